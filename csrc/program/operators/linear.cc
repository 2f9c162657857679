// linear: int8 rows times a packed weight.
#include <utility>

#include "kernels/dispatch.h"
#include "program/operators/activations.h"
#include "program/operators/operators.h"
#include "program/operators/panels.h"

namespace chunkrt {

ValueId linear(ProgramBuilder& builder, ValueId input, ValueId packed, ValueId scales,
               std::optional<ValueId> bias, std::optional<ValueId> residual, std::size_t num_digits,
               std::optional<float> input_step) {
  const Symbol symbol = builder.rows_of(input, "linear's input");
  const std::size_t depth = builder.width_of(input);
  require(depth <= kGemmMaxDepth, "linear: " + std::to_string(depth) +
                                      " inputs are too many to sum in int32; at most " +
                                      std::to_string(kGemmMaxDepth) + " are");
  require(builder.value(scales).shape.size() == 1,
          "linear: expected scales float32 [N], got " +
              describe(builder.value(scales).dtype, builder.value(scales).shape));
  const std::size_t columns = builder.value(scales).shape[0].size;
  const std::size_t groups = ceil_divide(depth, kGemmDepthPerGroup);
  const std::size_t blocks = ceil_divide(columns, kGemmColumnsPerBlock);
  builder.require_constant(scales, Dtype::float32, {fixed(columns)}, "linear's scales");
  builder.require_constant(
      packed, Dtype::int8,
      {fixed(blocks), fixed(groups), fixed(kGemmColumnsPerBlock), fixed(kGemmDepthPerGroup)},
      "linear's packed weight");
  require_addends(builder, bias, residual, symbol, columns, "linear");
  if (input_step) {
    require_step(*input_step, "linear's input step");
    require(!bias && !residual, "linear: on a grid the bias and the residual are added afterwards; use add");
  }

  const std::vector<Digit> digits = digits_of(builder, input, num_digits, input_step);
  // On a grid the digits' sums are joined before they are scaled, so that the scales cannot round them apart.
  const ValueId column_scales = input_step ? builder.floats(std::vector<float>(columns, 1.0f)) : scales;
  const ValueId out = builder.float_rows(symbol, columns);
  std::vector<ValueId> uses = {packed, column_scales, out};
  std::optional<Outliers> outliers;
  if (!input_step) {
    outliers = outliers_of(builder, input);
    uses.insert(uses.end(), {outliers->counts, outliers->channels, outliers->values});
  }
  for (const Digit& digit : digits) uses.insert(uses.end(), {digit.values, digit.scales, digit.sums});
  if (bias) uses.push_back(*bias);
  if (residual) uses.push_back(*residual);
  GemmFunction* kernel = select_kernel(gemm_f32_s8row_s8col).function;
  AddOutliersFunction* add_outliers = select_kernel(add_outliers_f32_s8col).function;
  builder.add_loop([blocks](const Frame&) { return blocks; }, kBlocksPerPanel, uses,
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                     const GemmArgs args = {
                         .left = nullptr,
                         .left_scales = nullptr,
                         .left_sums = nullptr,
                         .right = frame.get<const std::int8_t>(packed),
                         .right_scales = frame.get<const float>(column_scales),
                         .bias = bias ? frame.get<const float>(*bias) : nullptr,
                         .residual = residual ? frame.get<const float>(*residual) : nullptr,
                         .out = frame.get<float>(out),
                         .rows = frame.size_of(symbol),
                         .columns = columns,
                         .groups = groups,
                         .residual_stride = columns,
                         .out_stride = columns};
                     const auto add = [&](std::size_t block, std::size_t block_end) {
                       if (!outliers) return;
                       add_outliers({.outliers = outliers->in(frame),
                                     .packed = args.right,
                                     .scales = args.right_scales,
                                     .out = args.out,
                                     .rows = args.rows,
                                     .columns = columns,
                                     .groups = groups},
                                    block, block_end);
                     };
                     multiply_panels(kernel, args, frame, digits, begin, end, add);
                   });
  if (!input_step) return out;
  const auto* given = static_cast<const float*>(builder.value(scales).data);
  std::vector<float> products(given, given + columns);
  for (float& product : products) product *= *input_step;
  return mul(builder, out, builder.floats(std::move(products)));
}

}  // namespace chunkrt
