// The end of gemm, for the files that are compiled with AVX-512; nothing here is seen outside of them.
#pragma once

#include <immintrin.h>

#include "kernels/gemm/gemm.h"
#include "kernels/lanes_avx512.h"

namespace chunkrt {
namespace {

// The columns of one block and row, from their sums.
inline void store_block(const GemmArgs& args, std::size_t row, std::size_t block, __m512i sums) {
  const std::size_t column = block * kGemmColumnsPerBlock;
  const __mmask16 mask = first_lanes(args.columns - column);
  __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(args.left_scales[row]));
  value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, args.right_scales + column));
  if (args.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, args.bias + column));
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * args.residual_stride + column;
    value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, residual));
  }
  store_lanes(args.out + row * args.out_stride + column, mask, value);
}

}  // namespace
}  // namespace chunkrt
