// elementwise: operations on contiguous float32 arrays of `count` elements, with bit-identical results on all
// instruction sets.
//
// exp(x) is computed as 2^n * p(r), where n = round_half_to_even(x * log2(e)), r = fma(n, -kLn2Low, fma(n,
// -kLn2High, x)) and p is the polynomial below in Horner form with fused multiply-adds; x is first clamped to
// [-kExpLimit, kExpLimit] (a NaN stays a NaN). Its error is below 1.1 units in the last place. sigmoid(x) = 1
// / (1 + exp(-x)); its error is below 2.5 units in the last place for x > -kExpLimit, and its absolute error
// is below 2^-125 otherwise.
//
// erf_gelu(x) = x * Phi(x) is the exact form of gelu, where Phi is the normal distribution: h or 1 - h for x
// below or above 0, h = erfc(z) / 2 = t / 2 * exp(fma(-z, z, P(t))), z = |x| / sqrt(2), t = 1 / (1 + z / 2),
// and P is the polynomial with kErfcCoefficients (W. Press et al., Numerical Recipes, erfcc; relative error
// 1.2e-7); it is 0 for x below kErfGeluLimit. Its relative error is below (20 + 4 x^2) * 2^-24. quick_gelu(x)
// = x
// * sigmoid(kQuickGelu * x).
//
// xielu (Huang, xIELU, 2024), with parameters a_p, a_n, b and e: a_p x^2 + b x for x above 0, otherwise a_n
// (expm1(m) - x) + b x, m = min(x, e). expm1(m) is m + m^2 q(m), with the polynomial q of exp's p, for m
// above kExpm1Limit, and exp(m) - 1 otherwise.
//
// The exp kernel computes this exp, but returns 0 for x below -kExpLimit. gelu(x) = x * sigmoid(x * fma(x^2,
// kGeluCubic, kGeluLinear)) is the tanh form; its relative error grows with |x| like the sigmoid's argument.
// tanh(x) has the sign of x. With a = |x|, its magnitude is fma(q * a^2, a, a) for a below kTanhLimit, where
// q is the polynomial in a^2 with kTanhCoefficients, and 1 - 2 / (exp(2 a) + 1) otherwise; its error is below
// 2.5 units in the last place (polynomial: S. Moshier, Cephes). softplus(x) = max(x, 0) + log1p(u), where u =
// exp(-|x|), log1p(u) = s * fma(s^2, q, 2), s = u / (2 + u), and q is the polynomial in s^2 with
// kLog1pCoefficients; its error is below 4 units in the last place for x > -kExpLimit, and its absolute error
// is below 2^-125 otherwise. Polynomials are in Horner form with fused multiply-adds. relu(x) = max(x, 0) is
// exact; a NaN stays a NaN.
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

inline constexpr float kGeluLinear = 0x1.988454p+0f;  // 2 sqrt(2 / pi)
inline constexpr float kGeluCubic = 0x1.2444f2p-4f;   // 0.044715 of that
inline constexpr float kErfGeluLimit = -13.0f;
inline constexpr float kInverseRoot2 = 0x1.6a09e6p-1f;
inline constexpr float kErfcCoefficients[10] = {-1.26551223f, 1.00002368f, 0.37409196f,  0.09678418f,
                                                -0.18628806f, 0.27886807f, -1.13520398f, 1.48851587f,
                                                -0.82215223f, 0.17087277f};
inline constexpr float kQuickGelu = 1.702f;
inline constexpr float kExpm1Limit = -0.34f;
inline constexpr float kTanhLimit = 0.625f;
inline constexpr float kTanhCoefficients[5] = {-0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c5ap-5f,
                                               0x1.52269cp-6f, -0x1.75e1d4p-8f};
inline constexpr float kLog1pCoefficients[5] = {0x1.555558p-1f, 0x1.9996d6p-2f, 0x1.2504fcp-2f,
                                                0x1.b73066p-3f, 0x1.f07286p-3f};

// out = left + right, out = left * right; silu_mul: out = (left * sigmoid(left)) * right, gelu_mul: out =
// gelu(left) * right. out may be left or right.
using BinaryFunction = void(const float* left, const float* right, float* out, std::size_t count);
// out = sigmoid(input), and correspondingly for the other functions; out may be input.
using UnaryFunction = void(const float* input, float* out, std::size_t count);
// out = 0 where input < least, otherwise input; a NaN stays a NaN. out may be input.
using ThresholdFunction = void(const float* input, float least, float* out, std::size_t count);
// out = xielu(input) with parameters {a_p, a_n, b, e}; out may be input.
using XieluFunction = void(const float* input, const float* parameters, float* out, std::size_t count);
// out = (u + 1) * (g * sigmoid(alpha * g)), g = min(gate, limit), u = min(max(up, -limit), limit): the gated
// activation of gpt-oss. A NaN stays a NaN. out may be gate or up.
using ClampedSwigluFunction = void(const float* gate, const float* up, float alpha, float limit, float* out,
                                   std::size_t count);
// out = q * step, q = round_half_to_even(input / step) in [-levels, levels], with a step for each element;
// quotient and product are rounded to float32. Infinities saturate, a NaN stays a NaN. out may be input.
using RoundToGridFunction = void(const float* input, const float* steps, float levels, float* out,
                                 std::size_t count);
// Converts IEEE 754 binary16 (as uint16) to float32. The conversion is exact and keeps infinities and quiet
// NaNs.
using WidenFunction = void(const std::uint16_t* input, float* out, std::size_t count);

}  // namespace chunkrt
