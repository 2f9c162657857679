// outliers: the few large values of a row are removed before the row is quantised to int8, so that the other
// values keep a fine grid. The products of the removed values and the weight are added in float32.
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
// The sum has 64 partial sums, where partial sum i adds |x[i]|, |x[i + 64]|, .... The partial sums are then
// reduced: sum i += sum i + 32 for i < 32, sum i += sum i + 16, and so on. A fused multiply-add rounds once;
// all other operations round individually. So all instruction sets and all splits give bit-identical results.
// A row whose sum is not finite has no outliers, and is passed unchanged to the quantisation.
//
// The idea comes from Dettmers et al., LLM.int8() (2022), section 3.2, where the channels are fixed
// beforehand.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

inline constexpr float kOutlierRatio = 8.0f;

// Upper bound on the number of outliers of a row, including rounding errors of its sum.
constexpr std::size_t most_outliers(std::size_t width) { return width / 7 + 1; }

struct RowOutliers {
  std::int32_t* counts;    // int32 [rows]
  std::int32_t* channels;  // int32 [rows, capacity]: the k of the counts[row] outliers of a row, ascending
  float* values;           // float32 [rows, capacity]: the values x of these outliers
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
  std::size_t groups;  // number of groups of 4 channels
};

// Adds the outliers' products to the columns of blocks [block_begin, block_end).
using AddOutliersFunction = void(const AddOutliersArgs& args, std::size_t block_begin, std::size_t block_end);

struct AddBlockOutliersArgs {
  RowOutliers outliers;
  const std::uint8_t* right;          // the weight in the layout of kernels/block_gemm/block_gemm.h
  const std::uint16_t* right_scales;  // in the layout of kernels/block_gemm/block_gemm.h, too
  float* out;                         // float32 [rows, columns]
  std::size_t rows;
  std::size_t columns;
  std::size_t depth_blocks;  // number of blocks of 32 channels
};

using AddBlockOutliersFunction = void(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                      std::size_t block_end);

}  // namespace chunkrt
