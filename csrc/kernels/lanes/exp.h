// exp(x) and tanh(x) as elementwise.h defines them, for a vector of 16 lanes.
#pragma once

#include "kernels/elementwise/elementwise.h"
#include "kernels/lanes/lanes.h"

namespace chunkrt {
namespace {

// x is in [-kExpLimit, kExpLimit] or a NaN.
CHUNKRT_LANES Floats exp_of_bounded(Floats x) {
  const Floats n = round(x * all(kLog2E));
  const Floats r = multiply_add(n, all(-kLn2Low), multiply_add(n, all(-kLn2High), x));
  const Floats p = multiply_add(polynomial(kExpCoefficients, r), r, all(1.0f));
  return scale_by_power(multiply_add(p, r, all(1.0f)), n);
}

CHUNKRT_LANES Floats exponential(Floats x) {
  return exp_of_bounded(max(all(-kExpLimit), min(all(kExpLimit), x)));
}

// exp(x), but 0 for x below -kExpLimit; x is at most kExpLimit or a NaN.
CHUNKRT_LANES Floats exp_of_nonpositive(Floats x) {
  return zero_if_less(x, all(-kExpLimit), exp_of_bounded(max(all(-kExpLimit), x)));
}

CHUNKRT_LANES Floats hyperbolic_tangent(Floats x) {
  const Floats a = absolute(x), z = a * a;
  const Floats small = multiply_add(polynomial(kTanhCoefficients, z) * z, a, a);
  const Floats large = all(1.0f) - all(2.0f) / (exponential(all(2.0f) * a) + all(1.0f));
  return with_sign(select(less(a, all(kTanhLimit)), small, large), x);
}

}  // namespace
}  // namespace chunkrt
