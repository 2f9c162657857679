// outliers: the few large values of a row are taken out before it is quantised to int8, so that the others
// keep a fine grid; their products with the weight are added in float32.
//
//   limit = 8 * (|x[0]| + ... + |x[width - 1]|) / width, the product first, which is exact
//   outliers: those with |x[k]| > limit; fewer than width / 8, since the sum includes them
//   rest = x, with 0 where an outlier was
//
//   e = 0, then e = fma(x[k], float(weight[k, n]), e) over the outliers k of row m, ascending
//   out[m, n] = fma(e, scales[n], out[m, n])
//
// and with a weight in 4-bit blocks (kernels/block_gemm/block_gemm.h), b = k / 32:
//   e = fma(x[k], fma(q[k, n], scale[b, n], minimum[b, n]), e),  out[m, n] = out[m, n] + e
//
// The sum has 64 partial sums, number i adding |x[i]|, |x[i + 64]|, ..., which are then folded: i += i + 32
// for i < 32, i += i + 16, and so on. A fused multiply-add rounds once, everything else rounds each
// operation. So every instruction set and every split gives the same bits. A row whose sum is not finite has
// no outliers, and is passed unchanged to the quantisation.
//
// Source of the idea: Dettmers et al., LLM.int8() (2022), section 3.2, which fixes the channels beforehand.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

inline constexpr float kOutlierRatio = 8.0f;

// An upper bound for a row, including rounding errors of its sum.
constexpr std::size_t most_outliers(std::size_t width) { return width / 7 + 1; }

struct RowOutliers {
  std::int32_t* counts;    // int32 [rows]
  std::int32_t* channels;  // int32 [rows, capacity]: the k of the first counts[row], ascending
  float* values;           // float32 [rows, capacity]: their x
  std::size_t capacity;    // most_outliers(width)
};

struct TakeOutliersArgs {
  const float* input;  // float32 [rows, width]
  float* rest;         // float32 [rows, width]
  RowOutliers outliers;
  std::size_t width;
};

using TakeOutliersFunction = void(const TakeOutliersArgs& args, std::size_t row_begin, std::size_t row_end);

struct AddOutliersArgs {
  RowOutliers outliers;
  const std::int8_t* packed;  // the weight in the layout of kernels/gemm/gemm.h
  const float* scales;        // float32 [columns]
  float* out;                 // float32 [rows, columns]
  std::size_t rows;
  std::size_t columns;
  std::size_t groups;  // 4 channels each
};

// Adds the outliers' products to the columns of blocks [block_begin, block_end).
using AddOutliersFunction = void(const AddOutliersArgs& args, std::size_t block_begin, std::size_t block_end);

struct AddBlockOutliersArgs {
  RowOutliers outliers;
  const std::uint8_t* right;          // the weight in the layout of kernels/block_gemm/block_gemm.h
  const std::uint16_t* right_scales;  // as there
  float* out;                         // float32 [rows, columns]
  std::size_t rows;
  std::size_t columns;
  std::size_t depth_blocks;  // 32 channels each
};

using AddBlockOutliersFunction = void(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                      std::size_t block_end);

}  // namespace chunkrt
