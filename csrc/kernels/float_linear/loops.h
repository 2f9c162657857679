// float_linear for processors with vectors: plain loops that compilers turn into the vector code of the
// including file's instruction set. One file for each instruction set includes this header; nothing here is
// visible outside of that file.
#pragma once

#include <math.h>

#include "kernels/float_linear/float_linear.h"

namespace chunkrt {
namespace {

// Computes complete items for Rows adjacent rows, with the sums in registers.
template <std::size_t Rows>
void multiply_tile(const FloatLinearArgs& args, std::size_t row, std::size_t column) {
  float sums[Rows][kFloatLinearColumns] = {};
  for (std::size_t k = 0; k < args.depth; ++k) {
    const float* weight = args.weight + k * args.columns + column;
    for (std::size_t m = 0; m < Rows; ++m) {
      const float x = args.left[(row + m) * args.depth + k];
      for (std::size_t n = 0; n < kFloatLinearColumns; ++n) {
        sums[m][n] = fmaf(x, weight[n], sums[m][n]);
      }
    }
  }
  for (std::size_t m = 0; m < Rows; ++m) {
    float* out = args.out + (row + m) * args.columns + column;
    for (std::size_t n = 0; n < kFloatLinearColumns; ++n) out[n] = sums[m][n];
  }
}

void multiply_items(const FloatLinearArgs& args, std::size_t begin, std::size_t end) {
  constexpr std::size_t kRows = 4;
  for (std::size_t item = begin; item < end; ++item) {
    const std::size_t column = item * kFloatLinearColumns;
    if (column + kFloatLinearColumns <= args.columns) {
      std::size_t row = 0;
      for (; row + kRows <= args.rows; row += kRows) multiply_tile<kRows>(args, row, column);
      for (; row < args.rows; ++row) multiply_tile<1>(args, row, column);
      continue;
    }
    for (std::size_t row = 0; row < args.rows; ++row) {
      for (std::size_t n = column; n < args.columns; ++n) {
        float sum = 0.0f;
        for (std::size_t k = 0; k < args.depth; ++k) {
          sum = fmaf(args.left[row * args.depth + k], args.weight[k * args.columns + n], sum);
        }
        args.out[row * args.columns + n] = sum;
      }
    }
  }
}

}  // namespace
}  // namespace chunkrt
