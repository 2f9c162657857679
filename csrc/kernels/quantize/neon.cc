// quantize with NEON.
#include <arm_neon.h>

#include "kernels/quantize/quantize.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 8;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::uint32_t kNanBits = 0x7fc00000u;

float float_from_bits(std::uint32_t bits) { return vget_lane_f32(vreinterpret_f32_u32(vdup_n_u32(bits)), 0); }

uint32x4_t magnitude_bits(float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); }

// max|x| as the bits of a float: bits of magnitudes order like integers, with infinities and NaNs on top.
std::uint32_t largest_magnitude_bits(const float* input, std::size_t width) {
  uint32x4_t largest = vdupq_n_u32(0);
  std::size_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    largest = vmaxq_u32(largest, magnitude_bits(vld1q_f32(input + i)));
    largest = vmaxq_u32(largest, magnitude_bits(vld1q_f32(input + i + 4)));
  }
  for (; i < width; ++i) largest = vmaxq_u32(largest, magnitude_bits(vdupq_n_f32(input[i])));
  return vmaxvq_u32(largest);
}

void quantize_row(const QuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  std::int8_t* values = args.values + row * args.padded_width;
  const std::uint32_t bits = largest_magnitude_bits(input, args.width);
  const bool is_finite = bits < kInfinityBits;
  const float largest = float_from_bits(bits);
  const bool is_zero = !is_finite || largest < kQuantizeSmallestMagnitude;
  const float inverse = is_zero ? 0.0f : 127.0f / largest;
  const std::size_t width = is_zero ? 0 : args.width;
  int32x4_t sums = vdupq_n_s32(0);
  std::int32_t rest_sum = 0;
  std::size_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(input + i), inverse));
    const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(input + i + 4), inverse));
    sums = vaddq_s32(sums, vaddq_s32(low, high));
    vst1_s8(values + i, vqmovn_s16(vcombine_s16(vqmovn_s32(low), vqmovn_s32(high))));
  }
  for (; i < width; ++i) {
    const std::int32_t value = vcvtns_s32_f32(input[i] * inverse);
    rest_sum += value;
    values[i] = static_cast<std::int8_t>(value);
  }
  for (; i < args.padded_width; ++i) values[i] = 0;
  args.sums[row] = vaddvq_s32(sums) + rest_sum;
  args.scales[row] = is_zero ? 0.0f : largest / 127.0f;
  if (!is_finite) args.scales[row] = float_from_bits(kNanBits);
}

}  // namespace

void quantize_s8row_f32_neon(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row(args, row);
}

}  // namespace chunkrt
