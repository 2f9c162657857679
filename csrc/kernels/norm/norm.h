// norm: normalisation of rows by their root mean square, or by their mean and standard deviation.
//
//   out[i] = (x[i] * (1 / sqrt(sum / width + epsilon))) * weight[i],  sum = x[0]^2 + ... + x[width - 1]^2
//
// Numerics: all arithmetic is in float32. The sum has 16 partial sums, where lane i adds x[i]^2, x[i + 16]^2,
// ... (without fused multiply-adds: product and addition are rounded separately; a missing last element
// counts as +0). The partial sums are then reduced: lane i += lane i + 8 for i < 8, lane i += lane i + 4,
// lane i += lane i + 2, lane 0 += lane 1. So all instruction sets give bit-identical results. Relative error
// of the sum: at most (width / 16 + 6) * 2^-24.
//
// layer_norm:
//
//   out[i] = d[i] * (1 / sqrt(sum(d^2) / width + epsilon)) * weight[i] + bias[i],  d[i] = x[i] - sum(x) /
//   width
//
// Both sums are in the order above, and no product is fused with a sum.
#pragma once

#include <cstddef>

namespace chunkrt {

struct RmsNormArgs {
  const float* input;   // float32 [rows, width]
  const float* weight;  // float32 [width]
  float* out;           // float32 [rows, width]; may be `input`
  std::size_t width;
  float epsilon;
};

struct LayerNormArgs {
  const float* input;   // float32 [rows, width]
  const float* weight;  // float32 [width]
  const float* bias;    // float32 [width]
  float* out;           // float32 [rows, width]; may be `input`
  std::size_t width;
  float epsilon;
};

using RmsNormFunction = void(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end);
using LayerNormFunction = void(const LayerNormArgs& args, std::size_t row_begin, std::size_t row_end);

}  // namespace chunkrt
