// elementwise, portable: the reference implementation, which all others match bit for bit.
#include <bit>
#include <cmath>

#include "kernels/elementwise/elementwise.h"

namespace chunkrt {
namespace {

float exponential(float x) {
  x = x < -kExpLimit ? -kExpLimit : x > kExpLimit ? kExpLimit : x;
  const float n = std::nearbyint(x * kLog2E);
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, x));
  float q = kExpCoefficients[4];
  for (int i = 3; i >= 0; --i) q = std::fma(q, r, kExpCoefficients[i]);
  const float p = std::fma(std::fma(q, r, 1.0f), r, 1.0f);
  return std::ldexp(p, std::isnan(n) ? 0 : static_cast<int>(n));
}

float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// c[0] + z (c[1] + z (...)).
float polynomial(const float (&c)[5], float z) {
  float q = c[4];
  for (int i = 3; i >= 0; --i) q = std::fma(q, z, c[i]);
  return q;
}

float gelu(float x) { return x * sigmoid(x * std::fma(x * x, kGeluCubic, kGeluLinear)); }

float erf_gelu(float x) {
  const float z = std::fabs(x) * kInverseRoot2, t = 1.0f / std::fma(z, 0.5f, 1.0f);
  float p = kErfcCoefficients[9];
  for (int i = 8; i >= 0; --i) p = std::fma(p, t, kErfcCoefficients[i]);
  const float h = 0.5f * t * exponential(std::fma(-z, z, p));
  return x < kErfGeluLimit ? 0.0f : x * (x < 0.0f ? h : 1.0f - h);
}

float xielu(float x, const float* parameters) {
  const float m = x > parameters[3] ? parameters[3] : x;
  const float linear = parameters[2] * x;
  if (x > 0.0f) return std::fma(parameters[0] * x, x, linear);
  const float small = std::fma(m * m, polynomial(kExpCoefficients, m), m - x);
  const float large = (exponential(m) - 1.0f) - x;
  return std::fma(parameters[1], m > kExpm1Limit ? small : large, linear);
}

float softplus(float x) {
  const float u = exponential(-std::fabs(x)), s = u / (2.0f + u), z = s * s;
  return (x > 0.0f ? x : 0.0f) + s * std::fma(z, polynomial(kLog1pCoefficients, z), 2.0f);
}

float hyperbolic_tangent(float x) {
  const float a = std::fabs(x), z = a * a;
  const float small = std::fma(polynomial(kTanhCoefficients, z) * z, a, a);
  return std::copysign(a < kTanhLimit ? small : 1.0f - 2.0f / (exponential(2.0f * a) + 1.0f), x);
}

}  // namespace

void add_f32_f32_f32_reference(const float* left, const float* right, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = left[i] + right[i];
}

void mul_f32_f32_f32_reference(const float* left, const float* right, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = left[i] * right[i];
}

void sigmoid_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = sigmoid(input[i]);
}

void exp_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = input[i] < -kExpLimit ? 0.0f : exponential(input[i]);
}

void gelu_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = gelu(input[i]);
}

void erf_gelu_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = erf_gelu(input[i]);
}

void quick_gelu_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = input[i] * sigmoid(kQuickGelu * input[i]);
}

void xielu_f32_f32_reference(const float* input, const float* parameters, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = xielu(input[i], parameters);
}

void relu_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = input[i] <= 0.0f ? 0.0f : input[i];
}

void thresholded_relu_f32_f32_reference(const float* input, float least, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = input[i] < least ? 0.0f : input[i];
}

void softplus_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = softplus(input[i]);
}

void tanh_f32_f32_reference(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = hyperbolic_tangent(input[i]);
}

void silu_mul_f32_f32_f32_reference(const float* gate, const float* up, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = (gate[i] * sigmoid(gate[i])) * up[i];
}

void gelu_mul_f32_f32_f32_reference(const float* gate, const float* up, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = gelu(gate[i]) * up[i];
}

void clamped_swiglu_f32_f32_f32_reference(const float* gate, const float* up, float alpha, float limit,
                                          float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float g = gate[i] > limit ? limit : gate[i];
    const float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    out[i] = (u + 1.0f) * (g * sigmoid(alpha * g));
  }
}

void round_to_grid_f32_f32_f32_reference(const float* input, const float* steps, float levels, float* out,
                                         std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float q = std::nearbyint(input[i] / steps[i]);
    out[i] = (q > levels ? levels : q < -levels ? -levels : q) * steps[i];
  }
}

void widen_f32_f16_reference(const std::uint16_t* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t sign = (input[i] & 0x8000u) << 16;
    const std::uint32_t magnitude = input[i] & 0x7fffu;
    const std::uint32_t exponent = magnitude >> 10;
    if (exponent == 0) {  // zero or subnormal: an integer multiple of 2^-24
      const float value = static_cast<float>(magnitude) * 0x1p-24f;
      out[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
    } else {
      const std::uint32_t rebias = exponent == 31 ? (255u - 31u) << 23 : (127u - 15u) << 23;
      out[i] = std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
    }
  }
}

}  // namespace chunkrt
