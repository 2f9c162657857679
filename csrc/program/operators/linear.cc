// linear: the product of int8 rows and a packed weight of int8, or of 4-bit integers that are unpacked to
// int8 panel by panel.
#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/dispatch.h"
#include "program/operators/activations.h"
#include "program/operators/operators.h"
#include "program/operators/panels.h"

namespace chunkrt {
namespace {

// Size limit of a panel of unpacked weights with more than one block. Below this limit, the panel and the
// activations stay in the second-level cache.
constexpr std::size_t kUnpackedPanelBytes = 256 * 1024;

std::size_t blocks_per_unpacked_panel(const KernelRow<GemmFunction>& kernel, std::size_t groups) {
  const std::size_t block_bytes = std::max<std::size_t>(groups, 1) * kGemmBytesPerGroup;
  return std::clamp<std::size_t>(kUnpackedPanelBytes / block_bytes, 1, blocks_per_panel(kernel));
}

// Like multiply_panels, with the weight described by `packed`; `unpacked` has room for one panel.
void unpack_and_multiply(const KernelRow<GemmFunction>& kernel, UnpackFunction* unpack, const GemmArgs& args,
                         const UnpackArgs& packed, const Frame& frame, const std::vector<Digit>& digits,
                         std::size_t begin, std::size_t end, std::int8_t* unpacked) {
  const std::size_t most = blocks_per_unpacked_panel(kernel, args.groups);
  for (std::size_t block = begin; block < end; block += most) {
    const std::size_t num_blocks = std::min(most, end - block), column = block * kGemmColumnsPerBlock;
    UnpackArgs source = packed;
    source.out = unpacked;
    unpack(source, block, block + num_blocks);
    GemmArgs panel = args;
    panel.right = unpacked;
    panel.right_scales += column;
    panel.out += column;
    panel.columns -= column;
    multiply_panel(kernel.function, panel, frame, digits, 0, num_blocks);
  }
}

}  // namespace

ValueId linear(ProgramBuilder& builder, ValueId input, ValueId packed, ValueId scales,
               std::optional<ValueId> bias, std::optional<ValueId> residual, std::size_t num_digits,
               std::optional<float> input_step, std::optional<ValueId> multipliers) {
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
  // kernels/list.h has the rows; the functions are gemm_f32_s8row_s8col_ISA in kernels/gemm/ISA.cc.
  const KernelRow<GemmFunction>& kernel = select_kernel(gemm_f32_s8row_s8col);
  if (multipliers) {
    require(input_step.has_value(), "linear: 4-bit weights with multipliers require an input on a grid");
    const std::size_t depth_blocks = ceil_divide(depth, kUnpackDepth);
    builder.require_constant(packed, Dtype::uint8,
                             {fixed(blocks), fixed(depth_blocks), fixed(kUnpackGroups / 2),
                              fixed(kUnpackColumns), fixed(kGemmDepthPerGroup)},
                             "linear's packed weight of 4 bits");
    builder.require_constant(*multipliers, Dtype::uint8,
                             {fixed(blocks), fixed(depth_blocks), fixed(kUnpackColumns)},
                             "linear's multipliers");
    builder.need_scratch(
        ceil_divide(blocks_per_unpacked_panel(kernel, groups) * groups * kGemmBytesPerGroup, sizeof(float)));
  } else {
    builder.require_constant(
        packed, Dtype::int8,
        {fixed(blocks), fixed(groups), fixed(kGemmColumnsPerBlock), fixed(kGemmDepthPerGroup)},
        "linear's packed weight");
  }
  require_addends(builder, bias, residual, symbol, columns, "linear");
  if (input_step) {
    require_step(*input_step, "linear's input step");
    require(!bias && !residual, "linear: on a grid the bias and the residual are added afterwards; use add");
  }

  const std::vector<Digit> digits = arranged_digits(row_arrangement(kernel), builder, symbol,
                                                    digits_of(builder, input, num_digits, input_step));
  // On a grid, the sums of the digits are added before they are scaled, so that the scales do not round each
  // digit separately.
  const ValueId column_scales = input_step ? builder.floats(std::vector<float>(columns, 1.0f)) : scales;
  const ValueId out = builder.float_rows(symbol, columns);
  std::vector<ValueId> uses = {packed, column_scales, out};
  std::optional<Outliers> outliers;
  if (!input_step) {
    outliers = outliers_of(builder, input);
    uses.insert(uses.end(), {outliers->counts, outliers->channels, outliers->values});
  }
  for (const Digit& digit : digits) std::ranges::copy(digit.uses(), std::back_inserter(uses));
  if (bias) uses.push_back(*bias);
  if (residual) uses.push_back(*residual);
  if (multipliers) uses.push_back(*multipliers);
  UnpackFunction* unpack = select_kernel(unpack_s8col_u4block).function;
  AddOutliersFunction* add_outliers = select_kernel(add_outliers_f32_s8col).function;
  const std::size_t multiplying = builder.part("linear"), adding = builder.part("add_outliers");
  builder.add_loop([blocks](const Frame&) { return blocks; }, blocks_per_panel(kernel), "linear", uses,
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                     const GemmArgs args = {
                         .left = nullptr,
                         .left_scales = nullptr,
                         .left_sums = nullptr,
                         .right = multipliers ? nullptr : frame.get<const std::int8_t>(packed),
                         .right_scales = frame.get<const float>(column_scales),
                         .bias = bias ? frame.get<const float>(*bias) : nullptr,
                         .residual = residual ? frame.get<const float>(*residual) : nullptr,
                         .out = frame.get<float>(out),
                         .rows = frame.size_of(symbol),
                         .columns = columns,
                         .groups = groups,
                         .residual_stride = columns,
                         .out_stride = columns};
                     if (multipliers) {
                       const UnpackArgs weight = {.packed = frame.get<const std::uint8_t>(packed),
                                                  .multipliers = frame.get<const std::uint8_t>(*multipliers),
                                                  .out = nullptr,
                                                  .groups = groups};
                       unpack_and_multiply(kernel, unpack, args, weight, frame, digits, begin, end,
                                           reinterpret_cast<std::int8_t*>(scratch));
                       return;
                     }
                     const auto add = [&](std::size_t block, std::size_t block_end) {
                       if (!outliers) return;
                       frame.lap(multiplying);
                       add_outliers({.outliers = outliers->in(frame),
                                     .packed = args.right,
                                     .scales = args.right_scales,
                                     .out = args.out,
                                     .rows = args.rows,
                                     .columns = columns,
                                     .groups = groups},
                                    block, block_end);
                       frame.lap(adding);
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
