// The end of a product, for the files that are compiled with AVX2; nothing here is seen outside of them.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace chunkrt {
namespace {

// Eight neighbouring columns of one row: (value * left_scales) * scales + bias + residual, each rounded,
// where there are scales, bias and residual. Columns past N are not written.
template <typename Args>
void store_columns(const Args& args, std::size_t row, std::size_t column, __m256 value, const float* scales) {
  if (column >= args.columns) return;
  const std::size_t valid = args.columns - column;
  const int count = static_cast<int>(valid < 8 ? valid : 8);
  const __m256i mask =
      _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  value = _mm256_mul_ps(value, _mm256_set1_ps(args.left_scales[row]));
  if (scales != nullptr) value = _mm256_mul_ps(value, _mm256_maskload_ps(scales + column, mask));
  if (args.bias != nullptr) value = _mm256_add_ps(value, _mm256_maskload_ps(args.bias + column, mask));
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * args.residual_stride + column;
    value = _mm256_add_ps(value, _mm256_maskload_ps(residual, mask));
  }
  _mm256_maskstore_ps(args.out + row * args.out_stride + column, mask, value);
}

}  // namespace
}  // namespace chunkrt
