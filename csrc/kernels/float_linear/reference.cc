// float_linear, portable: the reference implementation, which all others match bit for bit.
#include <algorithm>
#include <cmath>

#include "kernels/float_linear/float_linear.h"

namespace chunkrt {

void float_linear_f32_f32_reference(const FloatLinearArgs& args, std::size_t begin, std::size_t end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::size_t last = std::min(end * kFloatLinearColumns, args.columns);
    for (std::size_t n = begin * kFloatLinearColumns; n < last; ++n) {
      float sum = 0.0f;
      for (std::size_t k = 0; k < args.depth; ++k) {
        sum = std::fma(args.left[row * args.depth + k], args.weight[k * args.columns + n], sum);
      }
      args.out[row * args.columns + n] = sum;
    }
  }
}

}  // namespace chunkrt
