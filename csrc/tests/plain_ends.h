// Arguments for the loops over tiles, in plain C++: the epilogue of gemm, and a kernel for the last few rows.
#pragma once

#include <numeric>

#include "kernels/list.h"
#include "tests/suite.h"

namespace chunkrt::testing {
namespace {

void store_plainly(const GemmArgs& args, std::size_t row, std::size_t block, const std::int32_t* sums) {
  for (std::size_t i = 0; i < kGemmColumnsPerBlock; ++i) {
    const std::size_t column = block * kGemmColumnsPerBlock + i;
    if (column >= args.columns) return;
    float value = static_cast<float>(sums[i]) * args.left_scales[row];
    value = value * args.right_scales[column];
    if (args.bias != nullptr) value = value + args.bias[column];
    if (args.residual != nullptr) value = value + args.residual[row * args.residual_stride + column];
    args.out[row * args.out_stride + column] = value;
  }
}

// VNNI kernels read the sums of rows.
void multiply_few_rows(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int8_t* values = args.left + row * depth;
    check(std::accumulate(values, values + depth, 0) == args.left_sums[row], "a row has another's sum");
  }
  gemm_f32_s8row_s8col_reference(args, block_begin, block_end);
}

}  // namespace
}  // namespace chunkrt::testing
