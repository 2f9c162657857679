// linear: activations to int8 rows, and their product with a packed weight.
#include <algorithm>
#include <utility>

#include "kernels/tables.h"
#include "program/builder.h"

namespace chunkrt {
namespace {

// Panels of three blocks are what the widest gemm kernel likes best; the others do not mind.
constexpr std::size_t kGemmBlocksPerPiece = 3;

std::size_t ceil_divide(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }

std::size_t padded(std::size_t width) { return ceil_divide(width, kGemmDepthPerGroup) * kGemmDepthPerGroup; }

}  // namespace

ProgramBuilder::Quantized ProgramBuilder::quantized_rows(ValueId input) {
  const Dimension rows = rows_dimension(rows_of(input, "linear's input"));
  return {.values = temporary(Dtype::int8, {rows, fixed(padded(width_of(input)))}),
          .scales = temporary(Dtype::float32, {rows}),
          .sums = temporary(Dtype::int32, {rows})};
}

ProgramBuilder::Quantized ProgramBuilder::quantize(ValueId input) {
  const Quantized out = quantized_rows(input);
  const std::size_t width = width_of(input);
  QuantizeFunction* kernel = select_kernel(quantize_s8row_f32_table()).function;
  add_row_step(rows_of(input, "linear's input"), {input, out.values, out.scales, out.sums},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 kernel({.input = frame.get<const float>(input),
                         .values = frame.get<std::int8_t>(out.values),
                         .scales = frame.get<float>(out.scales),
                         .sums = frame.get<std::int32_t>(out.sums),
                         .width = width,
                         .padded_width = padded(width)},
                        begin, end);
               });
  return out;
}

ValueId ProgramBuilder::remainder(ValueId input, const Quantized& quantized) {
  const Symbol symbol = rows_of(input, "linear's input");
  const std::size_t width = width_of(input);
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  add_row_step(symbol, {input, quantized.values, quantized.scales, out},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 for (std::size_t row = begin; row < end; ++row) {
                   const float scale = frame.get<const float>(quantized.scales)[row];
                   const std::int8_t* values =
                       frame.get<const std::int8_t>(quantized.values) + row * padded(width);
                   const float* source = frame.get<const float>(input) + row * width;
                   float* target = frame.get<float>(out) + row * width;
                   for (std::size_t i = 0; i < width; ++i) {
                     target[i] = source[i] - static_cast<float>(values[i]) * scale;
                   }
                 }
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
  GridQuantizeFunction* kernel = select_kernel(quantize_s8grid_f32_table()).function;
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
                         .padded_width = padded(width)},
                        begin, end);
               });
  return digits;
}

std::vector<ProgramBuilder::Quantized> ProgramBuilder::digits_of(ValueId input, std::size_t num_digits,
                                                                 std::optional<float> step) {
  require(num_digits == 1 || num_digits == 2,
          "linear: activations take 1 or 2 digits, not " + std::to_string(num_digits));
  const auto key = std::tuple(input, num_digits, step);
  if (const auto found = digits_.find(key); found != digits_.end()) return found->second;
  std::vector<Quantized> digits;
  if (step) {
    digits = quantize_on_grid(input, *step, num_digits);
  } else if (num_digits == 1) {
    digits = {quantize(input)};
  } else {
    digits = digits_of(input, 1, {});
    digits.push_back(quantize(remainder(input, digits.front())));
  }
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
  if (bias) require_constant(*bias, Dtype::float32, {fixed(columns)}, "linear's bias");
  if (input_step) {
    require_step(*input_step, "linear's input step");
    require(!bias && !residual, "linear: on a grid the bias and the residual are added afterwards; use add");
  }
  if (residual) {
    require(rows_of(*residual, "linear's residual") == symbol && width_of(*residual) == columns,
            "linear: the residual's shape is not the result's");
  }

  const std::vector<Quantized> digits = digits_of(input, num_digits, input_step);
  // On a grid the digits' sums are joined before they are scaled, so that the scales cannot round them apart.
  const ValueId column_scales = input_step ? floats(std::vector<float>(columns, 1.0f)) : scales;
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(columns)});
  std::vector<ValueId> uses = {packed, column_scales, out};
  for (const Quantized& digit : digits) uses.insert(uses.end(), {digit.values, digit.scales, digit.sums});
  if (bias) uses.push_back(*bias);
  if (residual) uses.push_back(*residual);
  GemmFunction* kernel = select_kernel(gemm_f32_s8row_s8col_table()).function;
  add_stage([blocks](const Frame&) { return blocks; }, kGemmBlocksPerPiece, uses,
            [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
              GemmArgs args = {.left = nullptr,
                               .left_scales = nullptr,
                               .left_sums = nullptr,
                               .right = frame.get<const std::int8_t>(packed),
                               .right_scales = frame.get<const float>(column_scales),
                               .bias = nullptr,
                               .residual = nullptr,
                               .out = frame.get<float>(out),
                               .rows = frame.size_of(symbol),
                               .columns = columns,
                               .groups = groups,
                               .residual_stride = columns,
                               .out_stride = columns};
              // Panel by panel, so that the second digit finds the weights in the cache.
              const std::size_t panel = digits.size() == 1 ? end - begin : kGemmBlocksPerPiece;
              for (std::size_t block = begin; block < end; block += panel) {
                args.bias = bias ? frame.get<const float>(*bias) : nullptr;
                args.residual = residual ? frame.get<const float>(*residual) : nullptr;
                for (const Quantized& digit : digits) {
                  args.left = frame.get<const std::int8_t>(digit.values);
                  args.left_scales = frame.get<const float>(digit.scales);
                  args.left_sums = frame.get<const std::int32_t>(digit.sums);
                  kernel(args, block, std::min(block + panel, end));
                  args.bias = nullptr;
                  args.residual = args.out;
                }
              }
            });
  if (!input_step) return out;
  const auto* given = static_cast<const float*>(value(scales).data);
  std::vector<float> products(given, given + columns);
  for (float& product : products) product *= *input_step;
  return mul(out, floats(std::move(products)));
}

}  // namespace chunkrt
