// elementwise with NEON.
#include <arm_neon.h>

#include "kernels/elementwise/elementwise.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 4;

// Loads the first min(count, 4) elements; the other lanes are 0.
float32x4_t load(const float* input, std::size_t count) {
  if (count >= kLanes) return vld1q_f32(input);
  float values[kLanes] = {};
  for (std::size_t i = 0; i < count; ++i) values[i] = input[i];
  return vld1q_f32(values);
}

void store(float* out, std::size_t count, float32x4_t x) {
  if (count >= kLanes) return vst1q_f32(out, x);
  float values[kLanes];
  vst1q_f32(values, x);
  for (std::size_t i = 0; i < count; ++i) out[i] = values[i];
}

float32x4_t exponential(float32x4_t x) {
  // min and max return a NaN if either operand is one.
  x = vmaxq_f32(vdupq_n_f32(-kExpLimit), vminq_f32(vdupq_n_f32(kExpLimit), x));
  const float32x4_t n = vrndnq_f32(vmulq_n_f32(x, kLog2E));
  float32x4_t r = vfmsq_f32(x, n, vdupq_n_f32(kLn2High));
  r = vfmsq_f32(r, n, vdupq_n_f32(kLn2Low));
  float32x4_t p = vdupq_n_f32(kExpCoefficients[4]);
  for (int i = 3; i >= 0; --i) p = vfmaq_f32(vdupq_n_f32(kExpCoefficients[i]), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
  const int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(n), 23);
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), exponent));
}

float32x4_t sigmoid(float32x4_t x) {
  const float32x4_t one = vdupq_n_f32(1.0f);
  return vdivq_f32(one, vaddq_f32(one, exponential(vnegq_f32(x))));
}

// exp(x), but 0 for x below -kExpLimit.
float32x4_t decay(float32x4_t x) {
  const uint32x4_t is_zero = vcltq_f32(x, vdupq_n_f32(-kExpLimit));
  return vbslq_f32(is_zero, vdupq_n_f32(0.0f), exponential(x));
}

// c[0] + z (c[1] + z (...)).
float32x4_t polynomial(const float* c, float32x4_t z) {
  float32x4_t q = vdupq_n_f32(c[4]);
  for (int i = 3; i >= 0; --i) q = vfmaq_f32(vdupq_n_f32(c[i]), q, z);
  return q;
}

float32x4_t gelu(float32x4_t x) {
  const float32x4_t factor = vfmaq_f32(vdupq_n_f32(kGeluLinear), vmulq_f32(x, x), vdupq_n_f32(kGeluCubic));
  return vmulq_f32(x, sigmoid(vmulq_f32(x, factor)));
}

float32x4_t softplus(float32x4_t x) {
  const float32x4_t two = vdupq_n_f32(2.0f), u = exponential(vnegq_f32(vabsq_f32(x)));
  const float32x4_t s = vdivq_f32(u, vaddq_f32(two, u)), z = vmulq_f32(s, s);
  const float32x4_t log1p = vmulq_f32(s, vfmaq_f32(two, z, polynomial(kLog1pCoefficients, z)));
  return vaddq_f32(vmaxq_f32(x, vdupq_n_f32(0.0f)), log1p);
}

float32x4_t hyperbolic_tangent(float32x4_t x) {
  const float32x4_t one = vdupq_n_f32(1.0f), two = vdupq_n_f32(2.0f);
  const float32x4_t a = vabsq_f32(x), z = vmulq_f32(a, a);
  const float32x4_t small = vfmaq_f32(a, vmulq_f32(polynomial(kTanhCoefficients, z), z), a);
  const float32x4_t large = vsubq_f32(one, vdivq_f32(two, vaddq_f32(exponential(vmulq_f32(two, a)), one)));
  const float32x4_t size = vbslq_f32(vcltq_f32(a, vdupq_n_f32(kTanhLimit)), small, large);
  return vbslq_f32(vdupq_n_u32(0x80000000u), x, size);
}

}  // namespace

void add_f32_f32_f32_neon(const float* left, const float* right, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, count - i, vaddq_f32(load(left + i, count - i), load(right + i, count - i)));
  }
}

void mul_f32_f32_f32_neon(const float* left, const float* right, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, count - i, vmulq_f32(load(left + i, count - i), load(right + i, count - i)));
  }
}

void sigmoid_f32_f32_neon(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, count - i, sigmoid(load(input + i, count - i)));
  }
}

void exp_f32_f32_neon(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, count - i, decay(load(input + i, count - i)));
  }
}

void gelu_f32_f32_neon(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, count - i, gelu(load(input + i, count - i)));
  }
}

void softplus_f32_f32_neon(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, count - i, softplus(load(input + i, count - i)));
  }
}

void tanh_f32_f32_neon(const float* input, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, count - i, hyperbolic_tangent(load(input + i, count - i)));
  }
}

void silu_mul_f32_f32_f32_neon(const float* gate, const float* up, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const float32x4_t g = load(gate + i, count - i), u = load(up + i, count - i);
    store(out + i, count - i, vmulq_f32(vmulq_f32(g, sigmoid(g)), u));
  }
}

void gelu_mul_f32_f32_f32_neon(const float* gate, const float* up, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const float32x4_t g = load(gate + i, count - i), u = load(up + i, count - i);
    store(out + i, count - i, vmulq_f32(gelu(g), u));
  }
}

void round_to_grid_f32_f32_f32_neon(const float* input, const float* steps, float levels, float* out,
                                    std::size_t count) {
  const float32x4_t most = vdupq_n_f32(levels), least = vdupq_n_f32(-levels);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const float32x4_t step = load(steps + i, count - i);
    const float32x4_t q = vrndnq_f32(vdivq_f32(load(input + i, count - i), step));
    // min and max return a NaN if either operand is one.
    const float32x4_t bounded = vmaxq_f32(least, vminq_f32(most, q));
    store(out + i, count - i, vmulq_f32(bounded, step));
  }
}

void widen_f32_f16_neon(const std::uint16_t* input, float* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(input + i))));
  }
  for (; i < count; ++i) {
    out[i] = vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(input[i]))), 0);
  }
}

}  // namespace chunkrt
