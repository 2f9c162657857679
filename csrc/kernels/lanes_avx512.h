// Loads and stores of vectors, and of their first lanes, for the files that are compiled with AVX-512.
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

}  // namespace
}  // namespace chunkrt
