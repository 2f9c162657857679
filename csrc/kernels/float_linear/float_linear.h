// float_linear: the product of float32 rows and a float32 weight, for the few small linear layers that no
// scheme quantises.
//
//   out[m, n] = the chain fma(left[m, k], weight[k, n], out[m, n]) over k ascending, from 0
//
// Each step rounds once, in that order, so all instruction sets and all splits give bit-identical results.
#pragma once

#include <cstddef>

namespace chunkrt {

inline constexpr std::size_t kFloatLinearColumns = 16;  // number of columns in an item

struct FloatLinearArgs {
  const float* left;    // float32 [rows, depth]
  const float* weight;  // float32 [depth, columns]
  float* out;           // float32 [rows, columns]
  std::size_t rows;
  std::size_t depth;
  std::size_t columns;
};

// Computes items [begin, end): item i consists of kFloatLinearColumns columns from i * kFloatLinearColumns
// on, for all rows.
using FloatLinearFunction = void(const FloatLinearArgs& args, std::size_t begin, std::size_t end);

}  // namespace chunkrt
