// gemm with AVX-512 VNNI: vpdpbusd multiplies unsigned by signed bytes, four k at a time, without saturation.
//
// The weights become the unsigned side (w + 128, a flip of the top bit), so that nothing has to be prepared
// when they are mapped; starting each sum at -128 * sum_k left[m, k] takes the offset back out. Sums wrap
// modulo 2^32 on the way, which leaves the exact result.
#include <immintrin.h>

#include <cstring>

#include "kernels/gemm/gemm.h"

namespace chunkrt {
namespace {

// A tile's accumulators fill 24 of the 32 registers: each weight register is used 8 times, each activation 3
// times.
constexpr std::size_t kTileRows = 8;
constexpr std::size_t kTileBlocks = 3;

constexpr std::size_t kPrefetchBytes = 1024;

template <std::size_t Rows, std::size_t Blocks>
void compute_tile(const GemmArgs& args, std::size_t row, std::size_t block) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  const std::size_t block_bytes = args.groups * kGemmBytesPerGroup;
  const std::int8_t* left = args.left + row * depth;
  const std::int8_t* right = args.right + block * block_bytes;

  __m512i sums[Rows][Blocks];
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t b = 0; b < Blocks; ++b) sums[m][b] = _mm512_set1_epi32(-128 * args.left_sums[row + m]);
  }
  const __m512i flip = _mm512_set1_epi8(-128);
  for (std::size_t group = 0; group < args.groups; ++group) {
    __m512i weights[Blocks];
    for (std::size_t b = 0; b < Blocks; ++b) {
      const std::int8_t* source = right + b * block_bytes + group * kGemmBytesPerGroup;
      _mm_prefetch(reinterpret_cast<const char*>(source + kPrefetchBytes), _MM_HINT_T0);
      weights[b] = _mm512_xor_si512(_mm512_loadu_si512(source), flip);
    }
    for (std::size_t m = 0; m < Rows; ++m) {
      std::int32_t quad;
      std::memcpy(&quad, left + m * depth + group * kGemmDepthPerGroup, sizeof(quad));
      const __m512i activations = _mm512_set1_epi32(quad);
      for (std::size_t b = 0; b < Blocks; ++b) {
        sums[m][b] = _mm512_dpbusd_epi32(sums[m][b], weights[b], activations);
      }
    }
  }

  for (std::size_t b = 0; b < Blocks; ++b) {
    const std::size_t column = (block + b) * kGemmColumnsPerBlock;
    const std::size_t valid = args.columns - column;
    const __mmask16 mask =
        valid >= kGemmColumnsPerBlock ? __mmask16{0xffff} : static_cast<__mmask16>((1u << valid) - 1u);
    const __m512 column_scales = _mm512_maskz_loadu_ps(mask, args.right_scales + column);
    for (std::size_t m = 0; m < Rows; ++m) {
      __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[m][b]), _mm512_set1_ps(args.left_scales[row + m]));
      value = _mm512_mul_ps(value, column_scales);
      if (args.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, args.bias + column));
      if (args.residual != nullptr) {
        const float* residual = args.residual + (row + m) * args.residual_stride + column;
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, residual));
      }
      _mm512_mask_storeu_ps(args.out + (row + m) * args.out_stride + column, mask, value);
    }
  }
}

template <std::size_t Blocks>
void compute_panel(const GemmArgs& args, std::size_t block) {
  std::size_t row = 0;
  for (; row + kTileRows <= args.rows; row += kTileRows) compute_tile<kTileRows, Blocks>(args, row, block);
  switch (args.rows - row) {
    case 1:
      return compute_tile<1, Blocks>(args, row, block);
    case 2:
      return compute_tile<2, Blocks>(args, row, block);
    case 3:
      return compute_tile<3, Blocks>(args, row, block);
    case 4:
      return compute_tile<4, Blocks>(args, row, block);
    case 5:
      return compute_tile<5, Blocks>(args, row, block);
    case 6:
      return compute_tile<6, Blocks>(args, row, block);
    case 7:
      return compute_tile<7, Blocks>(args, row, block);
    default:
      return;
  }
}

}  // namespace

void gemm_f32_s8row_s8col_avx512vnni(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  std::size_t block = block_begin;
  for (; block + kTileBlocks <= block_end; block += kTileBlocks) compute_panel<kTileBlocks>(args, block);
  if (block_end - block == 2) compute_panel<2>(args, block);
  if (block_end - block == 1) compute_panel<1>(args, block);
}

}  // namespace chunkrt
