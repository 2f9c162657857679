// norm, portable: the reference implementation, which all others match bit for bit.
#include <cmath>

#include "kernels/norm/norm.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;

// The sum of 16 partial sums, in the order of norm.h.
float reduced(float (&sums)[kLanes]) {
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

}  // namespace

void layer_norm_f32_f32_reference(const LayerNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  const auto width = static_cast<float>(args.width);
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const float* input = args.input + row * args.width;
    float* out = args.out + row * args.width;
    float values[kLanes] = {}, squares[kLanes] = {};
    for (std::size_t i = 0; i < args.width; ++i) values[i % kLanes] += input[i];
    const float mean = reduced(values) / width;
    for (std::size_t i = 0; i < args.width; ++i) {
      const float d = input[i] - mean;
      squares[i % kLanes] += d * d;
    }
    const float inverse = 1.0f / std::sqrt(reduced(squares) / width + args.epsilon);
    for (std::size_t i = 0; i < args.width; ++i) {
      out[i] = ((input[i] - mean) * inverse) * args.weight[i] + args.bias[i];
    }
  }
}

void rms_norm_f32_f32_reference(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const float* input = args.input + row * args.width;
    float* out = args.out + row * args.width;
    float sums[kLanes] = {};
    for (std::size_t i = 0; i < args.width; ++i) sums[i % kLanes] += input[i] * input[i];
    const float mean = reduced(sums) / static_cast<float>(args.width);
    const float inverse = 1.0f / std::sqrt(mean + args.epsilon);
    for (std::size_t i = 0; i < args.width; ++i) out[i] = (input[i] * inverse) * args.weight[i];
  }
}

}  // namespace chunkrt
