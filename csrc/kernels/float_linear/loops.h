// float_linear with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/float_linear/float_linear.h"
#include "kernels/lanes/lanes.h"

namespace chunkrt {
namespace {

static_assert(kFloatLinearColumns == kLanes);

// Computes the first `count` columns of an item, or all of them, for Rows adjacent rows.
template <std::size_t Rows, typename... Part>
void multiply_tile(const FloatLinearArgs& args, std::size_t row, std::size_t column, Part... rest) {
  Floats sums[Rows][1];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) sums[m][0] = all(0.0f);
  add_products(sums, args.left + row * args.depth, args.depth, args.weight + column, args.columns, args.depth,
               [=](const float* weight, std::size_t) { return load(weight, rest...); });
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) {
    store(args.out + (row + m) * args.columns + column, sums[m][0], rest...);
  }
}

// Computes all rows of an item.
template <typename... Part>
void multiply_item(const FloatLinearArgs& args, std::size_t column, Part... rest) {
  constexpr std::size_t kRows = 4;
  std::size_t row = 0;
  for (; row + kRows <= args.rows; row += kRows) multiply_tile<kRows>(args, row, column, rest...);
  for (; row < args.rows; ++row) multiply_tile<1>(args, row, column, rest...);
}

}  // namespace

void CHUNKRT_NAME(float_linear_f32_f32)(const FloatLinearArgs& args, std::size_t begin, std::size_t end) {
  for (std::size_t item = begin; item < end; ++item) {
    const std::size_t column = item * kLanes, columns = args.columns - column;
    if (columns >= kLanes) {
      multiply_item(args, column);
    } else {
      multiply_item(args, column, Rest(columns));
    }
  }
}

}  // namespace chunkrt
