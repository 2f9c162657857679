// rms_norm, layer_norm and head_norm.
#include <cstring>

#include "kernels/dispatch.h"
#include "program/operators/operators.h"

namespace chunkrt {

ValueId rms_norm(ProgramBuilder& builder, ValueId input, ValueId weight, float epsilon) {
  const Symbol symbol = builder.rows_of(input, "rms_norm's input");
  const std::size_t width = builder.width_of(input);
  builder.require_constant(weight, Dtype::float32, {fixed(width)}, "rms_norm's weight");
  const ValueId out = builder.float_rows(symbol, width);
  RmsNormFunction* kernel = select_kernel(rms_norm_f32_f32).function;
  builder.add_row_step(symbol, "rms_norm", {input, weight, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         kernel({.input = frame.get<const float>(input),
                                 .weight = frame.get<const float>(weight),
                                 .out = frame.get<float>(out),
                                 .width = width,
                                 .epsilon = epsilon},
                                begin, end);
                       });
  return out;
}

ValueId layer_norm(ProgramBuilder& builder, ValueId input, ValueId weight, ValueId bias, float epsilon) {
  const Symbol symbol = builder.rows_of(input, "layer_norm's input");
  const std::size_t width = builder.width_of(input);
  builder.require_constant(weight, Dtype::float32, {fixed(width)}, "layer_norm's weight");
  builder.require_constant(bias, Dtype::float32, {fixed(width)}, "layer_norm's bias");
  const ValueId out = builder.float_rows(symbol, width);
  LayerNormFunction* kernel = select_kernel(layer_norm_f32_f32).function;
  builder.add_row_step(symbol, "layer_norm", {input, weight, bias, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         kernel({.input = frame.get<const float>(input),
                                 .weight = frame.get<const float>(weight),
                                 .bias = frame.get<const float>(bias),
                                 .out = frame.get<float>(out),
                                 .width = width,
                                 .epsilon = epsilon},
                                begin, end);
                       });
  return out;
}

ValueId head_norm(ProgramBuilder& builder, ValueId input, ValueId weight, float epsilon) {
  const Symbol symbol = builder.rows_of(input, "head_norm's input");
  const std::size_t width = builder.width_of(input);
  const Shape& heads = builder.value(weight).shape;
  require(
      heads.size() == 2 && heads[0].size > 0 && heads[1].size > 0 && heads[1].size <= width / heads[0].size,
      "head_norm: expected a weight [heads, columns] that fits " +
          describe(Dtype::float32, builder.value(input).shape) + ", got " +
          describe(builder.value(weight).dtype, heads));
  builder.require_constant(weight, Dtype::float32, heads, "head_norm's weight");
  const std::size_t num_heads = heads[0].size, head_dim = heads[1].size, normed = num_heads * head_dim;
  const ValueId out = builder.float_rows(symbol, width);
  RmsNormFunction* kernel = select_kernel(rms_norm_f32_f32).function;
  builder.add_row_step(symbol, "head_norm", {input, weight, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         for (std::size_t row = begin; row < end; ++row) {
                           const float* source = frame.get<const float>(input) + row * width;
                           float* target = frame.get<float>(out) + row * width;
                           for (std::size_t head = 0; head < num_heads; ++head) {
                             const std::size_t first = head * head_dim;
                             kernel({.input = source + first,
                                     .weight = frame.get<const float>(weight) + first,
                                     .out = target + first,
                                     .width = head_dim,
                                     .epsilon = epsilon},
                                    0, 1);
                           }
                           std::memcpy(target + normed, source + normed, (width - normed) * sizeof(float));
                         }
                       });
  return out;
}

}  // namespace chunkrt
