// The epilogue of a product (scales, bias, residual), for the files that are compiled with AVX-512; nothing
// here is visible outside of them.
#pragma once

#include "kernels/lanes_avx512.h"

namespace chunkrt {
namespace {

// Stores sixteen adjacent columns of one row: (value * left_scales) * scales + bias + residual, with a
// rounding after each operation. Missing scales, bias or residual are omitted. Columns past N are not
// written.
template <typename Args>
void store_columns(const Args& args, std::size_t row, std::size_t column, __m512 value, const float* scales) {
  const __mmask16 mask = first_lanes(args.columns - column);
  value = _mm512_mul_ps(value, _mm512_set1_ps(args.left_scales[row]));
  if (scales != nullptr) value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, scales + column));
  if (args.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, args.bias + column));
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * args.residual_stride + column;
    value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, residual));
  }
  store_lanes(args.out + row * args.out_stride + column, mask, value);
}

}  // namespace
}  // namespace chunkrt
