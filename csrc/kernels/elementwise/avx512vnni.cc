// elementwise with AVX-512.
#include <immintrin.h>

#include "kernels/elementwise/elementwise.h"
#include "kernels/lanes_avx512.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;

__m512 exponential(__m512 x) {
  // min and max return their second operand if either is NaN; the operand order here keeps the NaN.
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

// exp(x), but 0 for x below -kExpLimit.
__m512 decay(__m512 x) {
  const __mmask16 is_zero = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-kExpLimit), _CMP_LT_OQ);
  return _mm512_mask_blend_ps(is_zero, exponential(x), _mm512_setzero_ps());
}

// c[0] + z (c[1] + z (...)).
__m512 polynomial(const float* c, __m512 z) {
  __m512 q = _mm512_set1_ps(c[4]);
  for (int i = 3; i >= 0; --i) q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(c[i]));
  return q;
}

__m512 gelu(__m512 x) {
  const __m512 factor =
      _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(kGeluCubic), _mm512_set1_ps(kGeluLinear));
  return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(x, factor)));
}

__m512 softplus(__m512 x) {
  const __m512 two = _mm512_set1_ps(2.0f), u = exponential(_mm512_or_ps(_mm512_set1_ps(-0.0f), x));
  const __m512 s = _mm512_div_ps(u, _mm512_add_ps(two, u)), z = _mm512_mul_ps(s, s);
  const __m512 log1p = _mm512_mul_ps(s, _mm512_fmadd_ps(z, polynomial(kLog1pCoefficients, z), two));
  return _mm512_add_ps(_mm512_max_ps(x, _mm512_setzero_ps()),
                       log1p);  // max turns a NaN into 0, but the log1p term remains NaN
}

__m512 hyperbolic_tangent(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  const __m512 a = _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x), z = _mm512_mul_ps(a, a);
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(polynomial(kTanhCoefficients, z), z), a, a);
  const __m512 power = exponential(_mm512_mul_ps(two, a));
  const __m512 large = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(power, one)));
  const __mmask16 is_small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(kTanhLimit), _CMP_LT_OQ);
  return _mm512_or_ps(_mm512_mask_blend_ps(is_small, large, small), _mm512_and_ps(_mm512_set1_ps(-0.0f), x));
}

template <typename Function>
void for_each(const float* input, float* out, std::size_t count, const Function& function) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    store_lanes(out + i, mask, function(_mm512_maskz_loadu_ps(mask, input + i)));
  }
}

template <typename Function>
void for_each(const float* left, const float* right, float* out, std::size_t count,
              const Function& function) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 l = _mm512_maskz_loadu_ps(mask, left + i), r = _mm512_maskz_loadu_ps(mask, right + i);
    store_lanes(out + i, mask, function(l, r));
  }
}

}  // namespace

void add_f32_f32_f32_avx512vnni(const float* left, const float* right, float* out, std::size_t count) {
  for_each(left, right, out, count, [](__m512 l, __m512 r) { return _mm512_add_ps(l, r); });
}

void mul_f32_f32_f32_avx512vnni(const float* left, const float* right, float* out, std::size_t count) {
  for_each(left, right, out, count, [](__m512 l, __m512 r) { return _mm512_mul_ps(l, r); });
}

void sigmoid_f32_f32_avx512vnni(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m512 x) { return sigmoid(x); });
}

void exp_f32_f32_avx512vnni(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m512 x) { return decay(x); });
}

void gelu_f32_f32_avx512vnni(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m512 x) { return gelu(x); });
}

void softplus_f32_f32_avx512vnni(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m512 x) { return softplus(x); });
}

void tanh_f32_f32_avx512vnni(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m512 x) { return hyperbolic_tangent(x); });
}

void silu_mul_f32_f32_f32_avx512vnni(const float* gate, const float* up, float* out, std::size_t count) {
  for_each(gate, up, out, count,
           [](__m512 g, __m512 u) { return _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u); });
}

void gelu_mul_f32_f32_f32_avx512vnni(const float* gate, const float* up, float* out, std::size_t count) {
  for_each(gate, up, out, count, [](__m512 g, __m512 u) { return _mm512_mul_ps(gelu(g), u); });
}

void round_to_grid_f32_f32_f32_avx512vnni(const float* input, const float* steps, float levels, float* out,
                                          std::size_t count) {
  const __m512 most = _mm512_set1_ps(levels), least = _mm512_set1_ps(-levels);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, input + i), step = _mm512_maskz_loadu_ps(mask, steps + i);
    const __m512 q =
        _mm512_roundscale_ps(_mm512_div_ps(x, step), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // min and max return their second operand if either is NaN; the operand order here keeps the NaN.
    const __m512 bounded = _mm512_max_ps(least, _mm512_min_ps(most, q));
    store_lanes(out + i, mask, _mm512_mul_ps(bounded, step));
  }
}

void widen_f32_f16_avx512vnni(const std::uint16_t* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    store_lanes(out + i, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, input + i)));
  }
}

}  // namespace chunkrt
