// Common parts of the linears: panels of column blocks, and the order in which the digits use them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/dispatch.h"
#include "program/operators/activations.h"

namespace chunkrt {

// Number of column blocks of a panel; pieces are multiples of this number. It is small enough
// that a panel's weights and results are still in the cache for the second digit or the outliers. Tiles are
// used in pairs, gemm with AVX2 may have to widen the activations for each panel, and the widest of the other
// kernels is fastest with three blocks.
template <typename Function>
std::size_t blocks_per_panel(const KernelRow<Function>& kernel) {
  return kernel.isa == Isa::amx ? 4 : kernel.isa == Isa::avx2 ? 6 : 3;
}

// Computes the columns of blocks [begin, end) of a few panels: the products of the digits and the weight.
// Bias and residual are added once.
template <typename Args>
void multiply_panel(void (*kernel)(const Args&, std::size_t, std::size_t), Args args, const Frame& frame,
                    const std::vector<Digit>& digits, std::size_t begin, std::size_t end) {
  for (const Digit& digit : digits) {
    args.left = frame.get<const std::int8_t>(digit.values);
    args.left_scales = frame.get<const float>(digit.scales);
    args.left_sums = frame.get<const std::int32_t>(digit.sums);
    if constexpr (requires { args.arranged; }) {
      args.arranged = digit.arranged ? frame.get<const std::int8_t>(*digit.arranged) : nullptr;
    }
    kernel(args, begin, end);
    args.bias = nullptr;
    args.residual = args.out;
  }
}

// Number of panels of a single digit after which outliers are added. A processor mispredicts the number of a
// row's outliers once for all of these panels; the results of more panels would leave the nearest cache.
inline constexpr std::size_t kPanelsTogether = 2;

// Computes the columns of blocks [begin, end), panel by panel; `add_outliers` adds to the columns of one or a
// few panels afterwards.
template <typename Function, typename Args, typename AddOutliers>
void multiply_panels(const KernelRow<Function>& kernel, const Args& args, const Frame& frame,
                     const std::vector<Digit>& digits, std::size_t begin, std::size_t end,
                     const AddOutliers& add_outliers) {
  const std::size_t at_once = blocks_per_panel(kernel) * (digits.size() == 1 ? kPanelsTogether : 1);
  for (std::size_t block = begin; block < end; block += at_once) {
    const std::size_t last = std::min(block + at_once, end);
    multiply_panel(kernel.function, args, frame, digits, block, last);
    add_outliers(block, last);
  }
}

}  // namespace chunkrt
