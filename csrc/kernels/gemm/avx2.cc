// gemm with AVX2: both sides are widened to int16 for vpmaddwd, whose int32 sums are exact for all int8
// values.
//
// vpmaddubsw would take int8 directly, but adds its pairs with saturation: 255 * 127 + 255 * 127 = 64770 >
// 32767.
#include <immintrin.h>

#include "kernels/gemm/gemm.h"

namespace chunkrt {
namespace {

// A register of widened weights holds 4 k of 4 columns, so 8 columns take two; with 6 rows the accumulators
// fill 12 of the 16 registers.
constexpr std::size_t kTileRows = 6;
constexpr std::size_t kTileColumns = 8;
constexpr std::size_t kTileBytesPerGroup = kTileColumns * kGemmDepthPerGroup;

void store(const GemmArgs& args, std::size_t row, std::size_t column, __m256i sums) {
  const float row_scale = args.left_scales[row];
  const float* residual =
      args.residual == nullptr ? nullptr : args.residual + row * args.residual_stride + column;
  float* out = args.out + row * args.out_stride + column;
  const std::size_t valid = args.columns - column;
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int count = valid < kTileColumns ? static_cast<int>(valid) : static_cast<int>(kTileColumns);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
  __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(row_scale));
  value = _mm256_mul_ps(value, _mm256_maskload_ps(args.right_scales + column, mask));
  if (args.bias != nullptr) value = _mm256_add_ps(value, _mm256_maskload_ps(args.bias + column, mask));
  if (residual != nullptr) value = _mm256_add_ps(value, _mm256_maskload_ps(residual, mask));
  _mm256_maskstore_ps(out, mask, value);
}

template <std::size_t Rows>
void compute_tile(const GemmArgs& args, std::size_t row, std::size_t column, const std::int8_t* right) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  const std::int8_t* left = args.left + row * depth;
  __m256i sums[Rows][2];  // each int32 is the sum over one pair of k; a column's two pairs are neighbours
  for (std::size_t m = 0; m < Rows; ++m) sums[m][0] = sums[m][1] = _mm256_setzero_si256();
  for (std::size_t group = 0; group < args.groups; ++group) {
    const std::int8_t* source = right + group * kGemmBytesPerGroup;
    const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 16)));
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m128i quads = _mm_castps_si128(
          _mm_broadcast_ss(reinterpret_cast<const float*>(left + m * depth + group * kGemmDepthPerGroup)));
      const __m256i activations = _mm256_cvtepi8_epi16(quads);
      sums[m][0] = _mm256_add_epi32(sums[m][0], _mm256_madd_epi16(low, activations));
      sums[m][1] = _mm256_add_epi32(sums[m][1], _mm256_madd_epi16(high, activations));
    }
  }
  for (std::size_t m = 0; m < Rows; ++m) {
    // hadd adds the pairs within 128-bit lanes and leaves columns 0 1 4 5 2 3 6 7.
    const __m256i pairs = _mm256_hadd_epi32(sums[m][0], sums[m][1]);
    store(args, row + m, column, _mm256_permute4x64_epi64(pairs, 0b11011000));
  }
}

void compute_columns(const GemmArgs& args, std::size_t column, const std::int8_t* right) {
  std::size_t row = 0;
  for (; row + kTileRows <= args.rows; row += kTileRows) compute_tile<kTileRows>(args, row, column, right);
  switch (args.rows - row) {
    case 1:
      return compute_tile<1>(args, row, column, right);
    case 2:
      return compute_tile<2>(args, row, column, right);
    case 3:
      return compute_tile<3>(args, row, column, right);
    case 4:
      return compute_tile<4>(args, row, column, right);
    case 5:
      return compute_tile<5>(args, row, column, right);
    default:
      return;
  }
}

}  // namespace

void gemm_f32_s8row_s8col_avx2(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::int8_t* right = args.right + block * args.groups * kGemmBytesPerGroup;
    const std::size_t column = block * kGemmColumnsPerBlock;
    compute_columns(args, column, right);
    if (column + kTileColumns < args.columns) {
      compute_columns(args, column + kTileColumns, right + kTileBytesPerGroup);
    }
  }
}

}  // namespace chunkrt
