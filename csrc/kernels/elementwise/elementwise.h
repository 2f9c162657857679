// elementwise: operations on contiguous float32 arrays of `count` elements. The same bits on every
// instruction set.
//
// exp(x) here is 2^n * p(r), n = round_half_to_even(x * log2(e)), r = fma(n, -kLn2Low, fma(n, -kLn2High, x))
// and p the polynomial below in Horner form with fused multiply-adds; x is first clamped to [-kExpLimit,
// kExpLimit] (a NaN stays a NaN). Its error is below 1.1 units in the last place. sigmoid(x) = 1 / (1 +
// exp(-x)), error below 2.5 units in the last place for x > -kExpLimit; below that its absolute error is
// under 2^-125.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

inline constexpr float kExpLimit = 87.0f;
inline constexpr float kLog2E = 0x1.715476p+0f;
inline constexpr float kLn2High = 0x1.62e400p-1f;
inline constexpr float kLn2Low = 0x1.7f7d1cp-20f;
// p(r) = 1 + r + r^2 (c[0] + r (c[1] + ...)): evaluated as q = c[4]; q = fma(q, r, c[3]) ... fma(q, r, c[0]);
// p = fma(fma(q, r, 1), r, 1).
inline constexpr float kExpCoefficients[5] = {0x1.fffffcp-2f, 0x1.555490p-3f, 0x1.5558f4p-5f, 0x1.123a6cp-7f,
                                              0x1.6a2352p-10f};

// out = left + right, out = left * right; out may be left or right.
using BinaryFunction = void(const float* left, const float* right, float* out, std::size_t count);
// out = sigmoid(input); out may be input.
using UnaryFunction = void(const float* input, float* out, std::size_t count);
// out = (gate * sigmoid(gate)) * up; out may be gate or up.
using SiluMulFunction = BinaryFunction;
// out = q * step, q = round_half_to_even(input / step) in [-levels, levels], with a step for each element;
// quotient and product are rounded to float32. Infinities saturate, a NaN stays a NaN. out may be input.
using RoundToGridFunction = void(const float* input, const float* steps, float levels, float* out,
                                 std::size_t count);
// out = input, IEEE 754 binary16 (as uint16) to float32: exact; infinities and quiet NaNs stay what they are.
using WidenFunction = void(const std::uint16_t* input, float* out, std::size_t count);

BinaryFunction add_f32_f32_f32_reference;
BinaryFunction add_f32_f32_f32_avx2;
BinaryFunction add_f32_f32_f32_avx512vnni;
BinaryFunction add_f32_f32_f32_neon;

BinaryFunction mul_f32_f32_f32_reference;
BinaryFunction mul_f32_f32_f32_avx2;
BinaryFunction mul_f32_f32_f32_avx512vnni;
BinaryFunction mul_f32_f32_f32_neon;

UnaryFunction sigmoid_f32_f32_reference;
UnaryFunction sigmoid_f32_f32_avx2;
UnaryFunction sigmoid_f32_f32_avx512vnni;
UnaryFunction sigmoid_f32_f32_neon;

SiluMulFunction silu_mul_f32_f32_f32_reference;
SiluMulFunction silu_mul_f32_f32_f32_avx2;
SiluMulFunction silu_mul_f32_f32_f32_avx512vnni;
SiluMulFunction silu_mul_f32_f32_f32_neon;

RoundToGridFunction round_to_grid_f32_f32_f32_reference;
RoundToGridFunction round_to_grid_f32_f32_f32_avx2;
RoundToGridFunction round_to_grid_f32_f32_f32_avx512vnni;
RoundToGridFunction round_to_grid_f32_f32_f32_neon;

WidenFunction widen_f32_f16_reference;
WidenFunction widen_f32_f16_avx2;
WidenFunction widen_f32_f16_avx512vnni;
WidenFunction widen_f32_f16_neon;

}  // namespace chunkrt
