// float_linear: rows of float32 times a float32 weight, for the few small linears that no scheme quantises.
//
//   out[m, n] = the chain fma(left[m, k], weight[k, n], out[m, n]) over k ascending, from 0
//
// Each step rounds once, in that order, so every instruction set and every split gives the same bits.
#pragma once

#include <cstddef>

namespace chunkrt {

inline constexpr std::size_t kFloatLinearColumns = 16;  // columns in an item

struct FloatLinearArgs {
  const float* left;    // float32 [rows, depth]
  const float* weight;  // float32 [depth, columns]
  float* out;           // float32 [rows, columns]
  std::size_t rows;
  std::size_t depth;
  std::size_t columns;
};

// Computes items [begin, end): item i is the columns from i * kFloatLinearColumns on, of all rows.
using FloatLinearFunction = void(const FloatLinearArgs& args, std::size_t begin, std::size_t end);

}  // namespace chunkrt
