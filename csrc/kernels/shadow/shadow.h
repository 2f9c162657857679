// shadow: the product of the weight and the part of a linear layer's input that exceeds the 8-bit
// quantisation range.
//
//   q = round_half_to_even(x / step),  r = x - clip(q, -127, 127) * step where |q| > 127, else 0
//   y[t, n] = sum over k, ascending, of r[t, k] * (float(weight[k, n]) * scales[n])
//
// Every operation rounds once to float32, and sums start at +0. So results are bit-identical on all
// instruction sets, and omitting the k with r = 0 does not change them. |q| > 127 means |x / step| >= 127.5,
// where the quotient is rounded first.
//
// A NaN is an outlier, too, with r = NaN, and for an infinity r is infinite or NaN. All values of such rows
// of y are non-finite.
//
// There are three kernels: find_outliers lists the non-zero r, channel by channel (a channel is a column k of
// x); dequantize_row makes the weight's row of one channel; add_outer_product adds a channel's products to y.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

inline constexpr std::size_t kShadowChannelsPerBlock = 16;
inline constexpr float kShadowLevels = 127.0f;
// the smallest |x / step| that rounds to more than the levels
inline constexpr float kShadowThreshold = 127.5f;

// The outliers of a chunk. The outliers of channel k are in the first counts[k] places of row k of `rows` and
// `remainders`.
struct OutlierLists {
  std::int32_t* block_counts;  // int32 [ceil(width / 16)]: number of outliers in 16 channels
  std::int32_t* counts;        // int32 [width]: number of outliers in each channel
  std::int32_t* rows;          // int32 [width, num_rows]: rows of the outliers, ascending
  float* remainders;           // float32 [width, num_rows]: values r of the outliers
};

struct FindOutliersArgs {
  const float* input;  // float32 [num_rows, width]
  float step;          // finite, above 0
  OutlierLists lists;
  std::size_t num_rows;
  std::size_t width;
};

// Lists the outliers of the channels in blocks [block_begin, block_end).
using FindOutliersFunction = void(const FindOutliersArgs& args, std::size_t block_begin,
                                  std::size_t block_end);

struct DequantizeRowArgs {
  const std::int8_t* packed;  // int8, in the layout of kernels/gemm/gemm.h
  const float* scales;        // float32 [columns]
  float* out;                 // float32: columns of blocks [block_begin, block_end), none past `columns`
  std::size_t channel;
  std::size_t columns;
  std::size_t groups;
};

// out = float(weight[channel, n]) * scales[n] for the columns n of blocks [block_begin, block_end).
using DequantizeRowFunction = void(const DequantizeRowArgs& args, std::size_t block_begin,
                                   std::size_t block_end);

struct AddOuterProductArgs {
  const std::int32_t* rows;  // int32 [count]: rows of `out`
  const float* left;         // float32 [count]
  const float* right;        // float32 [columns]
  float* out;                // float32 [.., out_stride]
  std::size_t count;
  std::size_t columns;
  std::size_t out_stride;  // in elements
};

// out[rows[i], n] += left[i] * right[n]; product and sum are rounded separately.
using AddOuterProductFunction = void(const AddOuterProductArgs& args);

}  // namespace chunkrt
