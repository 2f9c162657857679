// linear: activations to int8 rows, and their product with a packed weight.
#include <utility>

#include "kernels/dispatch.h"
#include "program/builder.h"
#include "program/panels.h"

namespace chunkrt {

ProgramBuilder::Quantized ProgramBuilder::quantized_rows(ValueId input) {
  const Dimension rows = rows_dimension(rows_of(input, "linear's input"));
  return {.values = temporary(Dtype::int8, {rows, fixed(padded_depth(width_of(input)))}),
          .scales = temporary(Dtype::float32, {rows}),
          .sums = temporary(Dtype::int32, {rows})};
}

RowOutliers ProgramBuilder::Outliers::in(const Frame& frame) const {
  return {.counts = frame.get<std::int32_t>(counts),
          .channels = frame.get<std::int32_t>(channels),
          .values = frame.get<float>(values),
          .capacity = capacity};
}

const ProgramBuilder::Outliers& ProgramBuilder::outliers_of(ValueId input) {
  if (const auto found = outliers_.find(input); found != outliers_.end()) return found->second;
  const Symbol symbol = rows_of(input, "linear's input");
  const Dimension rows = rows_dimension(symbol);
  const std::size_t width = width_of(input), capacity = most_outliers(width);
  const Outliers out = {.rest = temporary(Dtype::float32, {rows, fixed(width)}),
                        .counts = temporary(Dtype::int32, {rows}),
                        .channels = temporary(Dtype::int32, {rows, fixed(capacity)}),
                        .values = temporary(Dtype::float32, {rows, fixed(capacity)}),
                        .capacity = capacity};
  TakeOutliersFunction* kernel = select_kernel(take_outliers_f32_f32).function;
  add_row_step(symbol, {input, out.rest, out.counts, out.channels, out.values},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 kernel({.input = frame.get<const float>(input),
                         .rest = frame.get<float>(out.rest),
                         .outliers = out.in(frame),
                         .width = width},
                        begin, end);
               });
  return outliers_[input] = out;
}

ProgramBuilder::Quantized ProgramBuilder::quantize(ValueId input) {
  const Quantized out = quantized_rows(input);
  const std::size_t width = width_of(input);
  QuantizeFunction* kernel = select_kernel(quantize_s8row_f32).function;
  add_row_step(rows_of(input, "linear's input"), {input, out.values, out.scales, out.sums},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 kernel({.input = frame.get<const float>(input),
                         .values = frame.get<std::int8_t>(out.values),
                         .scales = frame.get<float>(out.scales),
                         .sums = frame.get<std::int32_t>(out.sums),
                         .width = width,
                         .padded_width = padded_depth(width)},
                        begin, end);
               });
  return out;
}

std::vector<ProgramBuilder::Quantized> ProgramBuilder::quantize_on_grid(ValueId input, float step,
                                                                        std::size_t num_digits) {
  std::vector<Quantized> digits;  // the highest first
  std::vector<ValueId> uses = {input};
  for (std::size_t i = 0; i < num_digits; ++i) {
    const Quantized digit = quantized_rows(input);
    uses.insert(uses.end(), {digit.values, digit.scales, digit.sums});
    digits.push_back(digit);
  }
  const std::size_t width = width_of(input);
  GridQuantizeFunction* kernel = select_kernel(quantize_s8grid_f32).function;
  add_row_step(rows_of(input, "linear's input"), uses,
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 const auto target = [&frame](const Quantized& digit) {
                   return GridDigit{.values = frame.get<std::int8_t>(digit.values),
                                    .scales = frame.get<float>(digit.scales),
                                    .sums = frame.get<std::int32_t>(digit.sums)};
                 };
                 kernel({.input = frame.get<const float>(input),
                         .step = step,
                         .low = target(digits.back()),
                         .high = digits.size() == 2 ? target(digits.front()) : GridDigit{},
                         .width = width,
                         .padded_width = padded_depth(width)},
                        begin, end);
               });
  return digits;
}

std::vector<ProgramBuilder::Quantized> ProgramBuilder::digits_of(ValueId input, std::size_t num_digits,
                                                                 std::optional<float> step) {
  require(num_digits == 1 || (num_digits == 2 && step),
          "linear: activations take 1 digit, or on a grid 2, not " + std::to_string(num_digits));
  const auto key = std::tuple(input, num_digits, step);
  if (const auto found = digits_.find(key); found != digits_.end()) return found->second;
  const std::vector<Quantized> digits =
      step ? quantize_on_grid(input, *step, num_digits) : std::vector{quantize(outliers_of(input).rest)};
  digits_[key] = digits;
  return digits;
}

ValueId ProgramBuilder::linear(ValueId input, ValueId packed, ValueId scales, std::optional<ValueId> bias,
                               std::optional<ValueId> residual, std::size_t num_digits,
                               std::optional<float> input_step) {
  const Symbol symbol = rows_of(input, "linear's input");
  const std::size_t depth = width_of(input);
  require(depth <= kGemmMaxDepth, "linear: " + std::to_string(depth) +
                                      " inputs are too many to sum in int32; at most " +
                                      std::to_string(kGemmMaxDepth) + " are");
  require(value(scales).shape.size() == 1,
          "linear: expected scales float32 [N], got " + describe(value(scales).dtype, value(scales).shape));
  const std::size_t columns = value(scales).shape[0].size;
  const std::size_t groups = ceil_divide(depth, kGemmDepthPerGroup);
  const std::size_t blocks = ceil_divide(columns, kGemmColumnsPerBlock);
  require_constant(scales, Dtype::float32, {fixed(columns)}, "linear's scales");
  require_constant(packed, Dtype::int8,
                   {fixed(blocks), fixed(groups), fixed(kGemmColumnsPerBlock), fixed(kGemmDepthPerGroup)},
                   "linear's packed weight");
  require_addends(bias, residual, symbol, columns, "linear");
  if (input_step) {
    require_step(*input_step, "linear's input step");
    require(!bias && !residual, "linear: on a grid the bias and the residual are added afterwards; use add");
  }

  const std::vector<Quantized> digits = digits_of(input, num_digits, input_step);
  // On a grid the digits' sums are joined before they are scaled, so that the scales cannot round them apart.
  const ValueId column_scales = input_step ? floats(std::vector<float>(columns, 1.0f)) : scales;
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(columns)});
  std::vector<ValueId> uses = {packed, column_scales, out};
  std::optional<Outliers> outliers;
  if (!input_step) {
    outliers = outliers_of(input);
    uses.insert(uses.end(), {outliers->counts, outliers->channels, outliers->values});
  }
  for (const Quantized& digit : digits) uses.insert(uses.end(), {digit.values, digit.scales, digit.sums});
  if (bias) uses.push_back(*bias);
  if (residual) uses.push_back(*residual);
  GemmFunction* kernel = select_kernel(gemm_f32_s8row_s8col).function;
  AddOutliersFunction* add_outliers = select_kernel(add_outliers_f32_s8col).function;
  add_stage([blocks](const Frame&) { return blocks; }, kBlocksPerPanel, uses,
            [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
              const GemmArgs args = {.left = nullptr,
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
  const auto* given = static_cast<const float*>(value(scales).data);
  std::vector<float> products(given, given + columns);
  for (float& product : products) product *= *input_step;
  return mul(out, floats(std::move(products)));
}

ValueId ProgramBuilder::float_linear(ValueId input, ValueId weight) {
  const Symbol symbol = rows_of(input, "float_linear's input");
  const std::size_t depth = width_of(input);
  require(value(weight).shape.size() == 2, "float_linear: expected a weight float32 [K, N], got " +
                                               describe(value(weight).dtype, value(weight).shape));
  const std::size_t columns = width_of(weight);
  require_constant(weight, Dtype::float32, {fixed(depth), fixed(columns)}, "float_linear's weight");
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(columns)});
  FloatLinearFunction* kernel = select_kernel(float_linear_f32_f32).function;
  const std::size_t items = ceil_divide(columns, kFloatLinearColumns);
  add_stage([items](const Frame&) { return items; }, 1, {input, weight, out},
            [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
              kernel({.left = frame.get<const float>(input),
                      .weight = frame.get<const float>(weight),
                      .out = frame.get<float>(out),
                      .rows = frame.size_of(symbol),
                      .depth = depth,
                      .columns = columns},
                     begin, end);
            });
  return out;
}

}  // namespace chunkrt
