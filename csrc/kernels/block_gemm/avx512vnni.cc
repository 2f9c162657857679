// block_gemm with AVX-512 VNNI: vpdpbusd takes the 4-bit weights as its unsigned side and the activations as
// its signed one, so that a block of 32 k costs 8 of them for 16 columns of a row, and nothing to correct.
#include <immintrin.h>

#include <cstring>

#include "kernels/block_gemm/block_gemm.h"

namespace chunkrt {
namespace {

// Of each row the values and the sums of the block at hand are registers. With 8 rows that is half of the 32,
// and the work on the weights (12 instructions a block) is small beside the 64 products.
constexpr std::size_t kTileRows = 8;
constexpr std::size_t kDepthPerGroup = 8;
constexpr std::size_t kGroupBytes = 64;
constexpr std::size_t kGroups = kBlockDepth / kDepthPerGroup;

struct Values {
  __m512 of[kTileRows];
};

// Four neighbouring k of one row, in each lane.
__m512i broadcast(const std::int8_t* source) {
  std::int32_t quad;
  std::memcpy(&quad, source, sizeof(quad));
  return _mm512_set1_epi32(quad);
}

__m512 widen(const std::uint16_t* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

// The values of a tile of 16 columns. All loops but the one over blocks of depth unroll, so that values and
// sums are registers; inlining this into the code around it costs some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const BlockGemmArgs& args, std::size_t row, std::size_t block, Values& out) {
  const std::size_t depth = args.depth_blocks * kBlockDepth;
  const std::int8_t* left = args.left + row * depth;
  const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
  const std::uint8_t* right = args.right + block * args.depth_blocks * kBlockBytes;
  const std::uint8_t* right_end = right + args.depth_blocks * kBlockBytes;
  const std::uint16_t* right_scales = args.right_scales + block * args.depth_blocks * 2 * kBlockColumns;
  const __m512i low_half = _mm512_set1_epi8(15);

  // While a panel is in use the next one is fetched. The first tile asks for it: it is the only one when a
  // single token is decoded, and the one that finds the panel furthest from the core.
  const std::size_t ahead = row == 0 ? args.depth_blocks : 0;

  __m512 values[Rows];
#pragma GCC unroll 8
  for (std::size_t m = 0; m < Rows; ++m) values[m] = _mm512_setzero_ps();
  for (; right != right_end; right += kBlockBytes, right_scales += 2 * kBlockColumns) {
    _mm_prefetch(reinterpret_cast<const char*>(right_scales + ahead * 2 * kBlockColumns), _MM_HINT_T0);
    __m512i sums[Rows];
#pragma GCC unroll 8
    for (std::size_t m = 0; m < Rows; ++m) sums[m] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (std::size_t group = 0; group < kGroups; ++group, left += kDepthPerGroup) {
      const std::uint8_t* source = right + group * kGroupBytes;
      _mm_prefetch(reinterpret_cast<const char*>(source + ahead * kBlockBytes), _MM_HINT_T0);
      const __m512i weights = _mm512_loadu_si512(source);
      const __m512i low = _mm512_and_si512(weights, low_half);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(weights, 4), low_half);
#pragma GCC unroll 8
      for (std::size_t m = 0; m < Rows; ++m) {
        sums[m] = _mm512_dpbusd_epi32(sums[m], low, broadcast(left + m * depth));
      }
#pragma GCC unroll 8
      for (std::size_t m = 0; m < Rows; ++m) {
        sums[m] = _mm512_dpbusd_epi32(sums[m], high, broadcast(left + m * depth + 4));
      }
    }
    const __m512 scales = widen(right_scales), minima = widen(right_scales + kBlockColumns);
#pragma GCC unroll 8
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m512 left_sum = _mm512_cvtepi32_ps(_mm512_set1_epi32(left_sums[m * args.depth_blocks]));
      values[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m]), scales, values[m]);
      values[m] = _mm512_fmadd_ps(left_sum, minima, values[m]);
    }
    ++left_sums;
  }
#pragma GCC unroll 8
  for (std::size_t m = 0; m < Rows; ++m) out.of[m] = values[m];
}

void store(const BlockGemmArgs& args, std::size_t row, std::size_t block, __m512 value) {
  const std::size_t column = block * kBlockColumns;
  const std::size_t valid = args.columns - column;
  const __mmask16 mask =
      valid >= kBlockColumns ? __mmask16{0xffff} : static_cast<__mmask16>((1u << valid) - 1u);
  value = _mm512_mul_ps(value, _mm512_set1_ps(args.left_scales[row]));
  if (args.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, args.bias + column));
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * args.residual_stride + column;
    value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, residual));
  }
  _mm512_mask_storeu_ps(args.out + row * args.out_stride + column, mask, value);
}

template <std::size_t Rows>
void compute_tile(const BlockGemmArgs& args, std::size_t row, std::size_t block) {
  Values values;
  accumulate<Rows>(args, row, block, values);
  for (std::size_t m = 0; m < Rows; ++m) store(args, row + m, block, values.of[m]);
}

}  // namespace

void block_gemm_f32_s8row_u4block_avx512vnni(const BlockGemmArgs& args, std::size_t block_begin,
                                             std::size_t block_end) {
  constexpr void (*kComputeTile[])(const BlockGemmArgs&, std::size_t, std::size_t) = {
      compute_tile<1>, compute_tile<2>, compute_tile<3>, compute_tile<4>,
      compute_tile<5>, compute_tile<6>, compute_tile<7>, compute_tile<8>};
  for (std::size_t block = block_begin; block < block_end; ++block) {
    for (std::size_t row = 0; row < args.rows; row += kTileRows) {
      const std::size_t left = args.rows - row;
      kComputeTile[(left < kTileRows ? left : kTileRows) - 1](args, row, block);
    }
  }
}

}  // namespace chunkrt
