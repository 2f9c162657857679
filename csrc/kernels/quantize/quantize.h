// quantize: symmetric quantisation of float32 rows to int8, with a scale for each row or one step for all
// rows.
//
// quantize_s8row uses one scale per row:
//
//   scale = max|x| / 127,  value = round_half_to_even(x * (127 / max|x|)) in [-127, 127]
//
// Results are bit-identical on all instruction sets. A row whose max|x| is below 2^-120 counts as zero:
// values, scale and sum are 0. A row that holds an infinity or a NaN gets scale NaN and values 0, so that
// everything computed from it is NaN.
//
// quantize_s8grid uses one step for all rows, and one digit or two digits to the base 256:
//
//   q = round_half_to_even(x / step) in [-levels, levels],  q = high * 256 + low
//
// The quotient is rounded to float32 first, as in NumPy; x * (1 / step) would differ. high is in [-127, 127],
// and low is in [-128, 127]. With one digit, high is 0 and is not stored. Results are bit-identical on all
// instruction sets. Infinities saturate. A NaN counts as 0, and the scales of its row are NaN.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

inline constexpr float kQuantizeSmallestMagnitude = 0x1p-120f;

struct QuantizeArgs {
  const float* input;   // float32 [rows, width]
  std::int8_t* values;  // int8 [rows, padded_width]; columns from width on are set to 0
  float* scales;        // float32 [rows]
  std::int32_t* sums;   // int32 [rows]: the sum of each row of `values`
  std::size_t width;
  std::size_t padded_width;  // width rounded up to a multiple of 4
};

using QuantizeFunction = void(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end);

// The largest q. With two digits, it is the largest number with both digits at most 127.
inline constexpr std::int32_t kOneDigitLevels = 127;
inline constexpr std::int32_t kTwoDigitLevels = 127 * 256 + 127;

// The values of one digit for all rows.
struct GridDigit {
  std::int8_t* values;  // int8 [rows, padded_width]; columns from width on are set to 0
  float* scales;        // float32 [rows], in steps of the grid: weight of the digit, or NaN
  std::int32_t* sums;   // int32 [rows]: the sum of each row of `values`
};

struct GridQuantizeArgs {
  const float* input;  // float32 [rows, width]
  float step;          // finite, above 0
  GridDigit low;       // weight 1
  GridDigit high;      // weight 256; nullptrs for one digit
  std::size_t width;
  std::size_t padded_width;  // width rounded up to a multiple of 4
};

using GridQuantizeFunction = void(const GridQuantizeArgs& args, std::size_t row_begin, std::size_t row_end);

}  // namespace chunkrt
