// exp(x) as elementwise.h defines it, for a vector of 16 lanes.
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

}  // namespace
}  // namespace chunkrt
