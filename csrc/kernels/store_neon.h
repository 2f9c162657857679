// The epilogue of a product (scales, bias, residual), for the files that are compiled for Arm; nothing here
// is visible outside of them.
#pragma once

#include <arm_neon.h>

#include <cstddef>

namespace chunkrt {
namespace {

// Stores four adjacent columns of one row: (value * left_scales) * scales + bias + residual, with a rounding
// after each operation. Missing scales, bias or residual are omitted. Columns past N are not written.
template <typename Args>
void store_columns(const Args& args, std::size_t row, std::size_t column, float32x4_t value,
                   const float* scales) {
  if (column >= args.columns) return;
  const std::size_t valid = args.columns - column;
  const float* residual =
      args.residual == nullptr ? nullptr : args.residual + row * args.residual_stride + column;
  float* out = args.out + row * args.out_stride + column;
  value = vmulq_n_f32(value, args.left_scales[row]);
  if (valid >= 4) {
    if (scales != nullptr) value = vmulq_f32(value, vld1q_f32(scales + column));
    if (args.bias != nullptr) value = vaddq_f32(value, vld1q_f32(args.bias + column));
    if (residual != nullptr) value = vaddq_f32(value, vld1q_f32(residual));
    vst1q_f32(out, value);
    return;
  }
  float values[4];
  vst1q_f32(values, value);
  for (std::size_t i = 0; i < valid; ++i) {
    if (scales != nullptr) values[i] *= scales[column + i];
    if (args.bias != nullptr) values[i] += args.bias[column + i];
    if (residual != nullptr) values[i] += residual[i];
    out[i] = values[i];
  }
}

}  // namespace
}  // namespace chunkrt
