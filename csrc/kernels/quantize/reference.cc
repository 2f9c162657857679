// quantize, portable: the reference implementation, which all others match bit for bit.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/quantize/quantize.h"

namespace chunkrt {

void quantize_s8row_f32_reference(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const float* input = args.input + row * args.width;
    std::int8_t* values = args.values + row * args.padded_width;
    float largest = 0.0f;
    bool is_finite = true;
    for (std::size_t i = 0; i < args.width; ++i) {
      const float magnitude = std::fabs(input[i]);
      is_finite = is_finite && std::isfinite(magnitude);
      if (magnitude > largest) largest = magnitude;
    }
    const bool is_zero = !is_finite || largest < kQuantizeSmallestMagnitude;
    const float inverse = is_zero ? 0.0f : 127.0f / largest;
    std::int32_t sum = 0;
    for (std::size_t i = 0; i < args.padded_width; ++i) {
      const bool is_padding = i >= args.width || is_zero;
      values[i] = is_padding ? std::int8_t{0} : static_cast<std::int8_t>(std::nearbyint(input[i] * inverse));
      sum += values[i];
    }
    const float scale = is_zero ? 0.0f : largest / 127.0f;
    args.sums[row] = sum;
    args.scales[row] = is_finite ? scale : std::numeric_limits<float>::quiet_NaN();
  }
}

void quantize_s8grid_f32_reference(const GridQuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  const bool has_high = args.high.values != nullptr;
  const auto levels = static_cast<float>(has_high ? kTwoDigitLevels : kOneDigitLevels);
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const float* input = args.input + row * args.width;
    const std::size_t target = row * args.padded_width;
    bool has_nan = false;
    std::int32_t low_sum = 0, high_sum = 0;
    for (std::size_t i = 0; i < args.padded_width; ++i) {
      float rounded = i < args.width ? std::nearbyint(input[i] / args.step) : 0.0f;
      if (std::isnan(rounded)) {
        has_nan = true;
        rounded = 0.0f;
      }
      const auto q = static_cast<std::int32_t>(std::clamp(rounded, -levels, levels));
      const std::int32_t high = (q + 128) >> 8, low = q - high * 256;
      args.low.values[target + i] = static_cast<std::int8_t>(low);
      if (has_high) args.high.values[target + i] = static_cast<std::int8_t>(high);
      low_sum += low;
      high_sum += high;
    }
    const float unit = has_nan ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
    args.low.scales[row] = unit;
    args.low.sums[row] = low_sum;
    if (has_high) {
      args.high.scales[row] = unit * 256.0f;
      args.high.sums[row] = high_sum;
    }
  }
}

}  // namespace chunkrt
