// IEEE 754 binary16 by its definition, in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace chunkrt::testing {

inline double half_value(std::uint16_t half) {
  const int exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  const double sign = half >> 15 ? -1.0 : 1.0;
  if (exponent == 31) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(fraction, -24) : sign * std::ldexp(1024 + fraction, exponent - 25);
}

// Rounds to nearest even: to a multiple of 2^-24 below 2^-14, to a multiple of 2^(e - 10) in [2^e, 2^(e +
// 1)), and to infinity from 65520 on.
inline double rounded_to_half(float value) {
  const double exact = static_cast<double>(value);
  if (!std::isfinite(exact)) return exact;
  const int exponent = exact == 0.0 ? -14 : std::max(std::ilogb(exact), -14);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(exact, 10 - exponent)), exponent - 10);
  return std::fabs(rounded) > 65504.0 ? std::copysign(std::numeric_limits<double>::infinity(), exact)
                                      : rounded;
}

}  // namespace chunkrt::testing
