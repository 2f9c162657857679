// The epilogue of a product (scales, bias, residual), for the files that are compiled with AVX2; nothing here
// is visible outside of them.
#pragma once

#include "kernels/lanes_avx2.h"

namespace chunkrt {
namespace {

// Stores eight adjacent columns of one row: (value * left_scales) * scales + bias + residual, with a rounding
// after each operation. Missing scales, bias or residual are omitted. Columns past N are not written.
template <typename Args>
[[gnu::always_inline]] inline void store_columns(const Args& args, std::size_t row, std::size_t column,
                                                 __m256 value, const float* scales) {
  if (column >= args.columns) return;
  const Lanes lanes(args.columns - column);
  value = _mm256_mul_ps(value, _mm256_set1_ps(args.left_scales[row]));
  if (scales != nullptr) value = _mm256_mul_ps(value, lanes.load(scales + column));
  if (args.bias != nullptr) value = _mm256_add_ps(value, lanes.load(args.bias + column));
  if (args.residual != nullptr) {
    value = _mm256_add_ps(value, lanes.load(args.residual + row * args.residual_stride + column));
  }
  lanes.store(args.out + row * args.out_stride + column, value);
}

}  // namespace
}  // namespace chunkrt
