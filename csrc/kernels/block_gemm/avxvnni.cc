// block_gemm with AVX-VNNI: the 256-bit vpdpbusd takes the 4-bit weights as its unsigned side and the
// activations as its signed one, so that a block of 32 k costs 8 of them for 8 columns of a row, and nothing
// to correct.
#include <immintrin.h>

#include <cstring>

#include "kernels/block_gemm/block_gemm.h"

namespace chunkrt {
namespace {

// With 6 rows the values and the sums of the block at hand fill 12 of the 16 registers.
constexpr std::size_t kTileRows = 6;
constexpr std::size_t kTileColumns = 8;
constexpr std::size_t kTiles = kBlockColumns / kTileColumns;
constexpr std::size_t kDepthPerGroup = 8;
constexpr std::size_t kGroupBytes = 64;
constexpr std::size_t kTileBytesPerGroup = kGroupBytes / kTiles;
constexpr std::size_t kGroups = kBlockDepth / kDepthPerGroup;

struct Values {
  __m256 of[kTileRows];
};

// Four neighbouring k of one row, in each lane.
__m256i broadcast(const std::int8_t* source) {
  std::int32_t quad;
  std::memcpy(&quad, source, sizeof(quad));
  return _mm256_set1_epi32(quad);
}

__m256 widen(const std::uint16_t* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

// The values of a tile of 8 columns. All loops but the one over blocks of depth unroll, so that values and
// sums are registers; inlining this into the code around it costs some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const BlockGemmArgs& args, std::size_t row, const std::uint8_t* right,
                                  const std::uint16_t* right_scales, Values& out) {
  const std::size_t depth = args.depth_blocks * kBlockDepth;
  const std::int8_t* left = args.left + row * depth;
  const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
  const std::uint8_t* right_end = right + args.depth_blocks * kBlockBytes;
  const __m256i low_half = _mm256_set1_epi8(15);

  __m256 values[Rows];
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) values[m] = _mm256_setzero_ps();
  for (; right != right_end; right += kBlockBytes, right_scales += 2 * kBlockColumns) {
    __m256i sums[Rows];
#pragma GCC unroll 6
    for (std::size_t m = 0; m < Rows; ++m) sums[m] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (std::size_t group = 0; group < kGroups; ++group, left += kDepthPerGroup) {
      const __m256i weights =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right + group * kGroupBytes));
      const __m256i low = _mm256_and_si256(weights, low_half);
#pragma GCC unroll 6
      for (std::size_t m = 0; m < Rows; ++m) {
        sums[m] = _mm256_dpbusd_avx_epi32(sums[m], low, broadcast(left + m * depth));
      }
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(weights, 4), low_half);
#pragma GCC unroll 6
      for (std::size_t m = 0; m < Rows; ++m) {
        sums[m] = _mm256_dpbusd_avx_epi32(sums[m], high, broadcast(left + m * depth + 4));
      }
    }
    const __m256 scales = widen(right_scales), minima = widen(right_scales + kBlockColumns);
#pragma GCC unroll 6
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m256 left_sum = _mm256_cvtepi32_ps(_mm256_set1_epi32(left_sums[m * args.depth_blocks]));
      values[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m]), scales, values[m]);
      values[m] = _mm256_fmadd_ps(left_sum, minima, values[m]);
    }
    ++left_sums;
  }
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) out.of[m] = values[m];
}

void store(const BlockGemmArgs& args, std::size_t row, std::size_t column, __m256 value) {
  const std::size_t valid = args.columns - column;
  const int count = static_cast<int>(valid < kTileColumns ? valid : kTileColumns);
  const __m256i mask =
      _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  value = _mm256_mul_ps(value, _mm256_set1_ps(args.left_scales[row]));
  if (args.bias != nullptr) value = _mm256_add_ps(value, _mm256_maskload_ps(args.bias + column, mask));
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * args.residual_stride + column;
    value = _mm256_add_ps(value, _mm256_maskload_ps(residual, mask));
  }
  _mm256_maskstore_ps(args.out + row * args.out_stride + column, mask, value);
}

template <std::size_t Rows>
void compute_tile(const BlockGemmArgs& args, std::size_t row, std::size_t column) {
  const std::size_t block = column / kBlockColumns * args.depth_blocks;
  const std::size_t tile = column % kBlockColumns / kTileColumns;
  Values values;
  accumulate<Rows>(args, row, args.right + block * kBlockBytes + tile * kTileBytesPerGroup,
                   args.right_scales + block * 2 * kBlockColumns + tile * kTileColumns, values);
  for (std::size_t m = 0; m < Rows; ++m) store(args, row + m, column, values.of[m]);
}

}  // namespace

void block_gemm_f32_s8row_u4block_avxvnni(const BlockGemmArgs& args, std::size_t block_begin,
                                          std::size_t block_end) {
  constexpr void (*kComputeTile[])(const BlockGemmArgs&, std::size_t, std::size_t) = {
      compute_tile<1>, compute_tile<2>, compute_tile<3>, compute_tile<4>, compute_tile<5>, compute_tile<6>};
  const std::size_t end = block_end * kBlockColumns < args.columns ? block_end * kBlockColumns : args.columns;
  for (std::size_t column = block_begin * kBlockColumns; column < end; column += kTileColumns) {
    for (std::size_t row = 0; row < args.rows; row += kTileRows) {
      const std::size_t left = args.rows - row;
      kComputeTile[(left < kTileRows ? left : kTileRows) - 1](args, row, column);
    }
  }
}

}  // namespace chunkrt
