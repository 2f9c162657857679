// quantize with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/lanes/lanes.h"
#include "kernels/quantize/quantize.h"

namespace chunkrt {
namespace {

constexpr std::int32_t kInfinityBits = 0x7f800000;
constexpr std::int32_t kNanBits = 0x7fc00000;

// max|x| as the bit pattern of a float: the patterns of magnitudes compare like integers, with infinities and
// NaNs above all finite values.
std::int32_t largest_magnitude_bits(const float* input, std::size_t width) {
  const Ints magnitude = all_ints(0x7fffffff);
  Ints maxima[2] = {all_ints(0), all_ints(0)};
  std::size_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    maxima[0] = max(maxima[0], bits_of(load(input + i)) & magnitude);
    maxima[1] = max(maxima[1], bits_of(load(input + i + kLanes)) & magnitude);
  }
  for (; i < width; i += kLanes) maxima[0] = max(maxima[0], bits_of(load(input + i, width - i)) & magnitude);
  return largest(max(maxima[0], maxima[1]));
}

void quantize_row(const QuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  std::int8_t* values = args.values + row * args.padded_width;
  const std::int32_t bits = largest_magnitude_bits(input, args.width);
  const bool is_finite = bits < kInfinityBits;
  const float largest = std::bit_cast<float>(bits);
  const bool is_zero = !is_finite || largest < kQuantizeSmallestMagnitude;
  const Floats inverse = all(is_zero ? 0.0f : 127.0f / largest);
  const std::size_t width = is_zero ? 0 : args.width;
  Ints sums = all_ints(0);
  std::size_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Ints rounded = to_ints(load(input + i) * inverse);
    sums = sums + rounded;
    store_bytes(values + i, rounded);
  }
  for (; i < args.padded_width; i += kLanes) {
    const Ints rounded = to_ints(load(input + i, i < width ? width - i : 0) * inverse);
    sums = sums + rounded;
    store_bytes(values + i, rounded, args.padded_width - i);
  }
  args.sums[row] = sum(sums);
  args.scales[row] = !is_finite ? std::bit_cast<float>(kNanBits) : is_zero ? 0.0f : largest / 127.0f;
}

struct Digits {
  Ints low, high;  // high is 0 with one digit
};

// The sums of a row's digits.
template <bool HasHigh>
class GridRow {
 public:
  explicit GridRow(float step) : step_(all(step)), numbers_(is_number(step_)) {}

  // Returns the digits of 16 elements, and adds them to the sums.
  CHUNKRT_LANES Digits add(Floats x) {
    const Floats quotient = x / step_, levels = all(HasHigh ? kTwoDigitLevels : kOneDigitLevels);
    const Mask is_quotient = is_number(quotient);
    numbers_ = numbers_ & is_quotient;
    const Ints q = to_ints(keep(is_quotient, max(-levels, min(levels, quotient))));
    const Ints high = HasHigh ? shift_right<8>(q + all_ints(128)) : all_ints(0);
    const Ints low = HasHigh ? q - shift_left<8>(high) : q;
    low_sums_ = low_sums_ + low;
    if (HasHigh) high_sums_ = high_sums_ + high;
    return {low, high};
  }

  CHUNKRT_LANES void finish(const GridQuantizeArgs& args, std::size_t row) const {
    const float unit = all_of(numbers_) ? 1.0f : std::bit_cast<float>(kNanBits);
    args.low.scales[row] = unit;
    args.low.sums[row] = sum(low_sums_);
    if (!HasHigh) return;
    args.high.scales[row] = unit * 256.0f;
    args.high.sums[row] = sum(high_sums_);
  }

 private:
  Floats step_;
  Mask numbers_;
  Ints low_sums_ = all_ints(0), high_sums_ = all_ints(0);
};

template <bool HasHigh>
void quantize_row_on_grid(const GridQuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  std::int8_t* low = args.low.values + row * args.padded_width;
  std::int8_t* high = HasHigh ? args.high.values + row * args.padded_width : nullptr;
  GridRow<HasHigh> grid(args.step);
  std::size_t i = 0;
  for (; i + kLanes <= args.width; i += kLanes) {
    const Digits digits = grid.add(load(input + i));
    store_bytes(low + i, digits.low);
    if (HasHigh) store_bytes(high + i, digits.high);
  }
  if (i < args.padded_width) {
    const Digits digits = grid.add(load(input + i, Rest(args.width - i)));
    store_bytes(low + i, digits.low, Rest(args.padded_width - i));
    if (HasHigh) store_bytes(high + i, digits.high, Rest(args.padded_width - i));
  }
  grid.finish(args, row);
}

}  // namespace

void CHUNKRT_NAME(quantize_s8row_f32)(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row(args, row);
}

void CHUNKRT_NAME(quantize_s8grid_f32)(const GridQuantizeArgs& args, std::size_t row_begin,
                                       std::size_t row_end) {
  const auto quantize =
      args.high.values != nullptr ? quantize_row_on_grid<true> : quantize_row_on_grid<false>;
  for (std::size_t row = row_begin; row < row_end; ++row) quantize(args, row);
}

}  // namespace chunkrt
