// elementwise with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/lanes/exp.h"

namespace chunkrt {
namespace {

CHUNKRT_LANES Floats sigmoid(Floats x) { return all(1.0f) / (all(1.0f) + exponential(-x)); }

CHUNKRT_LANES Floats gelu(Floats x) {
  return x * sigmoid(x * multiply_add(x * x, all(kGeluCubic), all(kGeluLinear)));
}

CHUNKRT_LANES Floats erf_gelu(Floats x) {
  const Floats z = absolute(x) * all(kInverseRoot2), t = all(1.0f) / multiply_add(z, all(0.5f), all(1.0f));
  Floats p = all(kErfcCoefficients[9]);
  for (int i = 8; i >= 0; --i) p = multiply_add(p, t, all(kErfcCoefficients[i]));
  const Floats h = all(0.5f) * t * exponential(multiply_add(-z, z, p));
  return zero_if_less(x, all(kErfGeluLimit), x * select(less(x, all(0.0f)), h, all(1.0f) - h));
}

CHUNKRT_LANES Floats xielu(Floats x, const float* parameters) {
  const Floats m = min(all(parameters[3]), x);
  const Floats small = multiply_add(m * m, polynomial(kExpCoefficients, m), m - x);
  const Floats large = (exponential(m) - all(1.0f)) - x;
  const Floats linear = all(parameters[2]) * x;
  const Floats below =
      multiply_add(all(parameters[1]), select(less(all(kExpm1Limit), m), small, large), linear);
  const Floats above = multiply_add(all(parameters[0]) * x, x, linear);
  return select(less(all(0.0f), x), above, below);
}

CHUNKRT_LANES Floats softplus(Floats x) {
  const Floats u = exponential(negative(x)), s = u / (all(2.0f) + u), z = s * s;
  const Floats log1p = s * multiply_add(z, polynomial(kLog1pCoefficients, z), all(2.0f));
  return max(x, all(0.0f)) + log1p;  // log1p is a NaN if x is
}

template <typename Function>
CHUNKRT_LANES void for_each(const float* input, float* out, std::size_t count, Function function) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(out + i, function(load(input + i, count - i)), count - i);
  }
}

template <typename Function>
CHUNKRT_LANES void for_each(const float* left, const float* right, float* out, std::size_t count,
                            Function function) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Floats l = load(left + i, count - i), r = load(right + i, count - i);
    store(out + i, function(l, r), count - i);
  }
}

}  // namespace

void CHUNKRT_NAME(add_f32_f32_f32)(const float* left, const float* right, float* out, std::size_t count) {
  for_each(left, right, out, count, [](Floats l, Floats r) { return l + r; });
}

void CHUNKRT_NAME(mul_f32_f32_f32)(const float* left, const float* right, float* out, std::size_t count) {
  for_each(left, right, out, count, [](Floats l, Floats r) { return l * r; });
}

void CHUNKRT_NAME(sigmoid_f32_f32)(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](Floats x) { return sigmoid(x); });
}

void CHUNKRT_NAME(exp_f32_f32)(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](Floats x) { return zero_if_less(x, all(-kExpLimit), exponential(x)); });
}

void CHUNKRT_NAME(gelu_f32_f32)(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](Floats x) { return gelu(x); });
}

void CHUNKRT_NAME(erf_gelu_f32_f32)(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](Floats x) { return erf_gelu(x); });
}

void CHUNKRT_NAME(quick_gelu_f32_f32)(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](Floats x) { return x * sigmoid(all(kQuickGelu) * x); });
}

void CHUNKRT_NAME(xielu_f32_f32)(const float* input, const float* parameters, float* out, std::size_t count) {
  for_each(input, out, count, [parameters](Floats x) { return xielu(x, parameters); });
}

void CHUNKRT_NAME(relu_f32_f32)(const float* input, float* out, std::size_t count) {
  const auto relu = [](Floats x) { return max(all(0.0f), x) + all(0.0f); };  // the sum of -0 and 0 is 0
  for_each(input, out, count, relu);
}

void CHUNKRT_NAME(thresholded_relu_f32_f32)(const float* input, float least, float* out, std::size_t count) {
  for_each(input, out, count, [least](Floats x) { return zero_if_less(x, all(least), x); });
}

void CHUNKRT_NAME(softplus_f32_f32)(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](Floats x) { return softplus(x); });
}

void CHUNKRT_NAME(tanh_f32_f32)(const float* input, float* out, std::size_t count) {
  for_each(input, out, count, [](Floats x) { return hyperbolic_tangent(x); });
}

void CHUNKRT_NAME(silu_mul_f32_f32_f32)(const float* gate, const float* up, float* out, std::size_t count) {
  for_each(gate, up, out, count, [](Floats g, Floats u) { return g * sigmoid(g) * u; });
}

void CHUNKRT_NAME(gelu_mul_f32_f32_f32)(const float* gate, const float* up, float* out, std::size_t count) {
  for_each(gate, up, out, count, [](Floats g, Floats u) { return gelu(g) * u; });
}

void CHUNKRT_NAME(clamped_swiglu_f32_f32_f32)(const float* gate, const float* up, float alpha, float limit,
                                              float* out, std::size_t count) {
  for_each(gate, up, out, count, [alpha, limit](Floats g, Floats u) {
    const Floats kept = min(all(limit), g), bounded = max(all(-limit), min(all(limit), u));
    return (bounded + all(1.0f)) * (kept * sigmoid(all(alpha) * kept));
  });
}

void CHUNKRT_NAME(round_to_grid_f32_f32_f32)(const float* input, const float* steps, float levels, float* out,
                                             std::size_t count) {
  for_each(input, steps, out, count, [levels](Floats x, Floats step) {
    return max(all(-levels), min(all(levels), round(x / step))) * step;
  });
}

void CHUNKRT_NAME(widen_f32_f16)(const std::uint16_t* input, float* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_halves(input + i));
  if (i == count) return;
  if (i > 0) {  // the last 16 elements, some of them again
    store(out + count - kLanes, load_halves(input + count - kLanes));
  } else {
    store(out, load_halves(input, Rest(count)), Rest(count));
  }
}

}  // namespace chunkrt
