// elementwise with AVX2.
#include <immintrin.h>

#include "kernels/elementwise/elementwise.h"
#include "kernels/lanes_avx2.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 8;

__m256 exponential(__m256 x) {
  // min and max return their second operand if either is NaN; the operand order here keeps the NaN.
  x = _mm256_max_ps(_mm256_set1_ps(-kExpLimit), _mm256_min_ps(_mm256_set1_ps(kExpLimit), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2E)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2High), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Low), r);
  __m256 p = _mm256_set1_ps(kExpCoefficients[4]);
  for (int i = 3; i >= 0; --i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExpCoefficients[i]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}

__m256 sigmoid(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 negated = _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
  return _mm256_div_ps(one, _mm256_add_ps(one, exponential(negated)));
}

// exp(x), but 0 for x below -kExpLimit.
__m256 decay(__m256 x) {
  const __m256 is_zero = _mm256_cmp_ps(x, _mm256_set1_ps(-kExpLimit), _CMP_LT_OQ);
  return _mm256_andnot_ps(is_zero, exponential(x));
}

// c[0] + z (c[1] + z (...)).
__m256 polynomial(const float* c, __m256 z) {
  __m256 q = _mm256_set1_ps(c[4]);
  for (int i = 3; i >= 0; --i) q = _mm256_fmadd_ps(q, z, _mm256_set1_ps(c[i]));
  return q;
}

__m256 gelu(__m256 x) {
  const __m256 factor =
      _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(kGeluCubic), _mm256_set1_ps(kGeluLinear));
  return _mm256_mul_ps(x, sigmoid(_mm256_mul_ps(x, factor)));
}

__m256 softplus(__m256 x) {
  const __m256 two = _mm256_set1_ps(2.0f), u = exponential(_mm256_or_ps(_mm256_set1_ps(-0.0f), x));
  const __m256 s = _mm256_div_ps(u, _mm256_add_ps(two, u)), z = _mm256_mul_ps(s, s);
  const __m256 log1p = _mm256_mul_ps(s, _mm256_fmadd_ps(z, polynomial(kLog1pCoefficients, z), two));
  return _mm256_add_ps(_mm256_max_ps(x, _mm256_setzero_ps()),
                       log1p);  // max turns a NaN into 0, but the log1p term remains NaN
}

__m256 hyperbolic_tangent(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f), two = _mm256_set1_ps(2.0f);
  const __m256 a = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), z = _mm256_mul_ps(a, a);
  const __m256 small = _mm256_fmadd_ps(_mm256_mul_ps(polynomial(kTanhCoefficients, z), z), a, a);
  const __m256 power = exponential(_mm256_mul_ps(two, a));
  const __m256 large = _mm256_sub_ps(one, _mm256_div_ps(two, _mm256_add_ps(power, one)));
  const __m256 is_small = _mm256_cmp_ps(a, _mm256_set1_ps(kTanhLimit), _CMP_LT_OQ);
  const __m256 sign = _mm256_and_ps(_mm256_set1_ps(-0.0f), x);
  return _mm256_or_ps(_mm256_blendv_ps(large, small, is_small), sign);
}

template <typename Function>
void for_each(const float* input, float* out, std::size_t count, const Function& function) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Lanes lanes(count - i);
    lanes.store(out + i, function(lanes.load(input + i)));
  }
}

template <typename Function>
void for_each(const float* left, const float* right, float* out, std::size_t count,
              const Function& function) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Lanes lanes(count - i);
    const __m256 l = lanes.load(left + i), r = lanes.load(right + i);
    lanes.store(out + i, function(l, r));
  }
}

}  // namespace

void add_f32_f32_f32_avx2(const float* left, const float* right, float* out, std::size_t count) {
  for_each(left, right, out, count, [](__m256 l, __m256 r) { return _mm256_add_ps(l, r); });
}

void mul_f32_f32_f32_avx2(const float* left, const float* right, float* out, std::size_t count) {
  for_each(left, right, out, count, [](__m256 l, __m256 r) { return _mm256_mul_ps(l, r); });
}

void sigmoid_f32_f32_avx2(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m256 x) { return sigmoid(x); });
}

void exp_f32_f32_avx2(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m256 x) { return decay(x); });
}

void gelu_f32_f32_avx2(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m256 x) { return gelu(x); });
}

void softplus_f32_f32_avx2(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m256 x) { return softplus(x); });
}

void tanh_f32_f32_avx2(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](__m256 x) { return hyperbolic_tangent(x); });
}

void silu_mul_f32_f32_f32_avx2(const float* gate, const float* up, float* out, std::size_t count) {
  for_each(gate, up, out, count,
           [](__m256 g, __m256 u) { return _mm256_mul_ps(_mm256_mul_ps(g, sigmoid(g)), u); });
}

void gelu_mul_f32_f32_f32_avx2(const float* gate, const float* up, float* out, std::size_t count) {
  for_each(gate, up, out, count, [](__m256 g, __m256 u) { return _mm256_mul_ps(gelu(g), u); });
}

void round_to_grid_f32_f32_f32_avx2(const float* input, const float* steps, float levels, float* out,
                                    std::size_t count) {
  const __m256 most = _mm256_set1_ps(levels), least = _mm256_set1_ps(-levels);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Lanes lanes(count - i);
    const __m256 x = lanes.load(input + i), step = lanes.load(steps + i);
    const __m256 q = _mm256_round_ps(_mm256_div_ps(x, step), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // min and max return their second operand if either is NaN; the operand order here keeps the NaN.
    const __m256 bounded = _mm256_max_ps(least, _mm256_min_ps(most, q));
    lanes.store(out + i, _mm256_mul_ps(bounded, step));
  }
}

void widen_f32_f16_avx2(const std::uint16_t* input, float* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(input + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) out[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(input[i])));
}

}  // namespace chunkrt
