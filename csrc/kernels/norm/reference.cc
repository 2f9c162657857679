// norm, portable: the reference implementation, which all others match bit for bit.
#include <cmath>

#include "kernels/norm/norm.h"

namespace chunkrt {

void rms_norm_f32_f32_reference(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  constexpr std::size_t kLanes = 16;
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const float* input = args.input + row * args.width;
    float* out = args.out + row * args.width;
    float sums[kLanes] = {};
    for (std::size_t i = 0; i < args.width; ++i) sums[i % kLanes] += input[i] * input[i];
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    const float mean = sums[0] / static_cast<float>(args.width);
    const float inverse = 1.0f / std::sqrt(mean + args.epsilon);
    for (std::size_t i = 0; i < args.width; ++i) out[i] = (input[i] * inverse) * args.weight[i];
  }
}

}  // namespace chunkrt
