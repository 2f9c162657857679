// elementwise with AVX-512.
#include <immintrin.h>

#include "kernels/elementwise/elementwise.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;

__mmask16 first_lanes(std::size_t count) {
  return count >= kLanes ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1u);
}

__m512 exponential(__m512 x) {
  // min and max return their second operand if one is NaN, which keeps it.
  x = _mm512_max_ps(_mm512_set1_ps(-kExpLimit), _mm512_min_ps(_mm512_set1_ps(kExpLimit), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2High), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Low), r);
  __m512 p = _mm512_set1_ps(kExpCoefficients[4]);
  for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExpCoefficients[i]));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

__m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 negated = _mm512_xor_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_div_ps(one, _mm512_add_ps(one, exponential(negated)));
}

}  // namespace

void add_f32_f32_f32_avx512vnni(const float* left, const float* right, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 l = _mm512_maskz_loadu_ps(mask, left + i), r = _mm512_maskz_loadu_ps(mask, right + i);
    _mm512_mask_storeu_ps(out + i, mask, _mm512_add_ps(l, r));
  }
}

void mul_f32_f32_f32_avx512vnni(const float* left, const float* right, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 l = _mm512_maskz_loadu_ps(mask, left + i), r = _mm512_maskz_loadu_ps(mask, right + i);
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(l, r));
  }
}

void sigmoid_f32_f32_avx512vnni(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    _mm512_mask_storeu_ps(out + i, mask, sigmoid(_mm512_maskz_loadu_ps(mask, input + i)));
  }
}

void silu_mul_f32_f32_f32_avx512vnni(const float* gate, const float* up, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 g = _mm512_maskz_loadu_ps(mask, gate + i), u = _mm512_maskz_loadu_ps(mask, up + i);
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u));
  }
}

void round_to_grid_f32_f32_f32_avx512vnni(const float* input, const float* steps, float levels, float* out,
                                          std::size_t count) {
  const __m512 most = _mm512_set1_ps(levels), least = _mm512_set1_ps(-levels);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, input + i), step = _mm512_maskz_loadu_ps(mask, steps + i);
    const __m512 q =
        _mm512_roundscale_ps(_mm512_div_ps(x, step), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // min and max return their second operand if one is NaN, which keeps it.
    const __m512 bounded = _mm512_max_ps(least, _mm512_min_ps(most, q));
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(bounded, step));
  }
}

void widen_f32_f16_avx512vnni(const std::uint16_t* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    _mm512_mask_storeu_ps(out + i, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, input + i)));
  }
}

}  // namespace chunkrt
