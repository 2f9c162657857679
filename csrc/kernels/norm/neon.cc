// norm with NEON: four registers of partial sums hold the sixteen lanes.
#include <arm_neon.h>

#include "kernels/norm/norm.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 4, kSums = 4;

// Returns the sum of squares, added in the order of norm.h.
float sum_of_squares(const float* input, std::size_t width) {
  float32x4_t sums[kSums] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
  std::size_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const float32x4_t x = vld1q_f32(input + i);
    float32x4_t& sum = sums[i / kLanes % kSums];
    sum = vaddq_f32(sum, vmulq_f32(x, x));
  }
  if (i < width) {
    float rest[kLanes] = {};
    for (std::size_t lane = 0; i + lane < width; ++lane) rest[lane] = input[i + lane];
    const float32x4_t x = vld1q_f32(rest);
    float32x4_t& sum = sums[i / kLanes % kSums];
    sum = vaddq_f32(sum, vmulq_f32(x, x));
  }
  const float32x4_t four = vaddq_f32(vaddq_f32(sums[0], sums[2]), vaddq_f32(sums[1], sums[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

void norm_row(const RmsNormArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* out = args.out + row * args.width;
  const float mean = sum_of_squares(input, args.width) / static_cast<float>(args.width);
  const float inverse = 1.0f / vget_lane_f32(vsqrt_f32(vdup_n_f32(mean + args.epsilon)), 0);
  std::size_t i = 0;
  for (; i + kLanes <= args.width; i += kLanes) {
    vst1q_f32(out + i, vmulq_f32(vmulq_n_f32(vld1q_f32(input + i), inverse), vld1q_f32(args.weight + i)));
  }
  for (; i < args.width; ++i) out[i] = (input[i] * inverse) * args.weight[i];
}

}  // namespace

void rms_norm_f32_f32_neon(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) norm_row(args, row);
}

}  // namespace chunkrt
