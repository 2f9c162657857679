// quantize: rows of float32 to int8, symmetric, with a scale for each row or one step for all.
//
// quantize_s8row, with one scale a row:
//
//   scale = max|x| / 127,  value = round_half_to_even(x * (127 / max|x|)) in [-127, 127]
//
// The same bits on every instruction set. A row whose max|x| is below 2^-120 counts as zero: values, scale
// and sum are 0. A row that holds an infinity or a NaN gets scale NaN and values 0, so that everything
// computed from it is NaN.
//
// quantize_s8grid, with one step for all rows, in one digit or in two to the base 256:
//
//   q = round_half_to_even(x / step) in [-levels, levels],  q = high * 256 + low
//
// The quotient is rounded to float32 first, as NumPy does it; x * (1 / step) would differ. high is in
// [-127, 127], low in [-128, 127]. With one digit high is 0 and is not stored. The same bits on every
// instruction set. Infinities saturate. A NaN counts as 0, and its row gets scales NaN.
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

// The largest q: of two digits, the largest number without a high digit of -128.
inline constexpr std::int32_t kOneDigitLevels = 127;
inline constexpr std::int32_t kTwoDigitLevels = 127 * 256 + 127;

// One digit of all rows.
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
