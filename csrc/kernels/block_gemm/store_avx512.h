// The end of block_gemm, for the files that are compiled with AVX-512; nothing here is seen outside of them.
#pragma once

#include <immintrin.h>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/lanes_avx512.h"

namespace chunkrt {
namespace {

// The columns of one block and row, from their values.
inline void store_block(const BlockGemmArgs& args, std::size_t row, std::size_t block, __m512 value) {
  const std::size_t column = block * kBlockColumns;
  const __mmask16 mask = first_lanes(args.columns - column);
  value = _mm512_mul_ps(value, _mm512_set1_ps(args.left_scales[row]));
  if (args.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, args.bias + column));
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * args.residual_stride + column;
    value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, residual));
  }
  store_lanes(args.out + row * args.out_stride + column, mask, value);
}

// 16 float16 as float32.
inline __m512 widen(const std::uint16_t* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

}  // namespace
}  // namespace chunkrt
