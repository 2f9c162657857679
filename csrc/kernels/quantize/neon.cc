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

// max|x| as the bit pattern of a float: the patterns of magnitudes compare like integers, with infinities and
// NaNs above all finite values.
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
  const float scale = !is_finite ? float_from_bits(kNanBits) : is_zero ? 0.0f : largest / 127.0f;
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
  args.scales[row] = scale;
}

// Narrows two registers of integers to int8; they fit.
int8x8_t narrow(int32x4_t first, int32x4_t second) {
  return vmovn_s16(vcombine_s16(vmovn_s32(first), vmovn_s32(second)));
}

struct Digits {
  int32x4_t low, high;
};

Digits digits_on_grid(float32x4_t x, float step, std::int32_t levels) {
  // The conversion rounds half to even, saturates, and converts NaN to 0.
  const int32x4_t rounded = vcvtnq_s32_f32(vdivq_f32(x, vdupq_n_f32(step)));
  const int32x4_t q = vmaxq_s32(vdupq_n_s32(-levels), vminq_s32(vdupq_n_s32(levels), rounded));
  const int32x4_t high = vshrq_n_s32(vaddq_s32(q, vdupq_n_s32(128)), 8);
  return {vsubq_s32(q, vshlq_n_s32(high, 8)), high};
}

void quantize_row_on_grid(const GridQuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  const bool has_high = args.high.values != nullptr;
  const std::int32_t levels = has_high ? kTwoDigitLevels : kOneDigitLevels;
  std::int8_t* low_values = args.low.values + row * args.padded_width;
  std::int8_t* high_values = has_high ? args.high.values + row * args.padded_width : nullptr;
  uint32x4_t numbers = vdupq_n_u32(0xffffffffu);
  int32x4_t low_sums = vdupq_n_s32(0), high_sums = vdupq_n_s32(0);
  std::int32_t rest_low_sum = 0, rest_high_sum = 0;
  std::size_t i = 0;
  for (; i + kLanes <= args.width; i += kLanes) {
    const float32x4_t x = vld1q_f32(input + i), next_x = vld1q_f32(input + i + 4);
    const Digits here = digits_on_grid(x, args.step, levels),
                 next = digits_on_grid(next_x, args.step, levels);
    numbers = vandq_u32(numbers, vandq_u32(vceqq_f32(x, x), vceqq_f32(next_x, next_x)));
    low_sums = vaddq_s32(low_sums, vaddq_s32(here.low, next.low));
    high_sums = vaddq_s32(high_sums, vaddq_s32(here.high, next.high));
    vst1_s8(low_values + i, narrow(here.low, next.low));
    if (has_high) vst1_s8(high_values + i, narrow(here.high, next.high));
  }
  for (; i < args.padded_width; ++i) {
    const float32x4_t x = vdupq_n_f32(i < args.width ? input[i] : 0.0f);
    const Digits here = digits_on_grid(x, args.step, levels);
    numbers = vandq_u32(numbers, vceqq_f32(x, x));
    const std::int32_t low = vgetq_lane_s32(here.low, 0), high = vgetq_lane_s32(here.high, 0);
    rest_low_sum += low;
    rest_high_sum += high;
    low_values[i] = static_cast<std::int8_t>(low);
    if (has_high) high_values[i] = static_cast<std::int8_t>(high);
  }
  const float unit = vminvq_u32(numbers) == 0 ? float_from_bits(kNanBits) : 1.0f;
  args.low.scales[row] = unit;
  args.low.sums[row] = vaddvq_s32(low_sums) + rest_low_sum;
  if (has_high) {
    args.high.scales[row] = unit * 256.0f;
    args.high.sums[row] = vaddvq_s32(high_sums) + rest_high_sum;
  }
}

}  // namespace

void quantize_s8row_f32_neon(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row(args, row);
}

void quantize_s8grid_f32_neon(const GridQuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row_on_grid(args, row);
}

}  // namespace chunkrt
