// quantize: rows of float32 to int8 with one scale a row, symmetric.
//
//   scale = max|x| / 127,  value = round_half_to_even(x * (127 / max|x|)) in [-127, 127]
//
// The same bits on every instruction set. A row whose max|x| is below 2^-120 counts as zero: values, scale
// and sum are 0. A row that holds an infinity or a NaN gets scale NaN and values 0, so that whatever is
// computed from it is NaN.
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

QuantizeFunction quantize_s8row_f32_reference;
QuantizeFunction quantize_s8row_f32_avx2;
QuantizeFunction quantize_s8row_f32_avx512vnni;
QuantizeFunction quantize_s8row_f32_neon;

}  // namespace chunkrt
