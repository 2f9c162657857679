// What the linears share: blocks, and the order in which digits meet them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "program/operators/activations.h"

namespace chunkrt {

// Blocks of columns that one call of a kernel gets, and of which a piece has a multiple. So few that the
// second digit, or the outliers, find a panel's weights and results in the cache; and the widest gemm kernel
// likes three best, the others do not mind.
inline constexpr std::size_t kBlocksPerPanel = 3;

// Computes the columns of blocks [begin, end) of one panel: the digits' products with the weight, and the
// bias and the residual once.
template <typename Args>
void multiply_panel(void (*kernel)(const Args&, std::size_t, std::size_t), Args args, const Frame& frame,
                    const std::vector<Digit>& digits, std::size_t begin, std::size_t end) {
  for (const Digit& digit : digits) {
    args.left = frame.get<const std::int8_t>(digit.values);
    args.left_scales = frame.get<const float>(digit.scales);
    args.left_sums = frame.get<const std::int32_t>(digit.sums);
    kernel(args, begin, end);
    args.bias = nullptr;
    args.residual = args.out;
  }
}

// Computes the columns of blocks [begin, end), panel by panel; `add_outliers` adds to a panel's columns
// afterwards.
template <typename Args, typename AddOutliers>
void multiply_panels(void (*kernel)(const Args&, std::size_t, std::size_t), const Args& args,
                     const Frame& frame, const std::vector<Digit>& digits, std::size_t begin, std::size_t end,
                     const AddOutliers& add_outliers) {
  for (std::size_t block = begin; block < end; block += kBlocksPerPanel) {
    const std::size_t panel_end = std::min(block + kBlocksPerPanel, end);
    multiply_panel(kernel, args, frame, digits, block, panel_end);
    add_outliers(block, panel_end);
  }
}

}  // namespace chunkrt
