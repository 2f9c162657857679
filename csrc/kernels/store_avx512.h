// The epilogue of a product (scales, bias, residual), for the files that are compiled with AVX-512; nothing
// here is visible outside of them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace chunkrt {
namespace {

inline __mmask16 first_lanes(std::size_t count) {
  return count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1u);
}

// A masked store cannot forward its data to a load soon after it; on AMD's processors this costs most of the
// time of a short loop. So a complete vector is stored without a mask.
inline void store_lanes(float* out, __mmask16 lanes, __m512 value) {
  if (lanes == 0xffff) {
    _mm512_storeu_ps(out, value);
  } else {
    _mm512_mask_storeu_ps(out, lanes, value);
  }
}

// Loads 16 float16 values as float32.
inline __m512 widen(const std::uint16_t* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

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
