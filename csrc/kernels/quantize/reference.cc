// quantize, portable: the definition that every other implementation must match bit for bit.
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
    args.sums[row] = sum;
    args.scales[row] = is_zero ? 0.0f : largest / 127.0f;
    if (!is_finite) args.scales[row] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace chunkrt
