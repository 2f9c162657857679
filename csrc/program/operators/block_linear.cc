// block_linear: quantises activations to int8 rows, as in linear, and multiplies them by a weight in 4-bit
// blocks.
#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "kernels/dispatch.h"
#include "program/operators/activations.h"
#include "program/operators/operators.h"
#include "program/operators/panels.h"

namespace chunkrt {
namespace {

struct BlockSums {
  std::map<ValueId, ValueId> of_digit;  // by the digit's values
};

// Returns int32 [rows, width / 32]: the sums of the blocks of a digit's rows. They are computed once.
ValueId block_sums_of(ProgramBuilder& builder, Symbol rows, const Digit& digit) {
  auto& made = builder.notes<BlockSums>().of_digit;
  if (const auto found = made.find(digit.values); found != made.end()) return found->second;
  const std::size_t depth_blocks = builder.width_of(digit.values) / kBlockDepth;
  const ValueId sums = builder.temporary(Dtype::int32, {rows_dimension(rows), fixed(depth_blocks)});
  builder.add_row_step(
      rows, "sum_blocks", {digit.values, sums},
      [=, values = digit.values](const Frame& frame, std::size_t begin, std::size_t end, float*) {
        const std::int8_t* source = frame.get<const std::int8_t>(values) + begin * depth_blocks * kBlockDepth;
        std::int32_t* target = frame.get<std::int32_t>(sums) + begin * depth_blocks;
        for (std::size_t b = 0; b < (end - begin) * depth_blocks; ++b) {
          std::int32_t sum = 0;
          for (std::size_t k = 0; k < kBlockDepth; ++k) sum += source[b * kBlockDepth + k];
          target[b] = sum;
        }
      });
  return made[digit.values] = sums;
}

}  // namespace

ValueId block_linear(ProgramBuilder& builder, ValueId input, ValueId packed, ValueId block_scales,
                     std::size_t columns, std::optional<ValueId> bias, std::optional<ValueId> residual) {
  const Symbol symbol = builder.rows_of(input, "block_linear's input");
  const std::size_t depth = builder.width_of(input);
  require(depth % kBlockDepth == 0, "block_linear: expected inputs in complete blocks of " +
                                        std::to_string(kBlockDepth) + ", got " + std::to_string(depth) +
                                        " inputs");
  require(columns > 0, "block_linear: expected at least 1 column, got 0");
  const std::size_t depth_blocks = depth / kBlockDepth;
  const std::size_t blocks = ceil_divide(columns, kBlockColumns);
  builder.require_constant(
      packed, Dtype::uint8,
      {fixed(blocks), fixed(depth_blocks), fixed(kBlockDepth / 8), fixed(kBlockColumns), fixed(4)},
      "block_linear's packed weight");
  builder.require_constant(block_scales, Dtype::float16,
                           {fixed(blocks), fixed(depth_blocks), fixed(2), fixed(kBlockColumns)},
                           "block_linear's scales and minima");
  require_addends(builder, bias, residual, symbol, columns, "block_linear");

  const Outliers outliers = outliers_of(builder, input);
  std::vector<Digit> digits = digits_of(builder, input, 1, {});
  // kernels/list.h has the rows; the functions are block_gemm_f32_s8row_u4block_ISA in
  // kernels/block_gemm/ISA.cc.
  const KernelRow<BlockGemmFunction>& kernel = select_kernel(block_gemm_f32_s8row_u4block);
  const std::optional<RowArrangement> arrangement = row_arrangement(kernel);
  // Arranged rows include the sums of their blocks.
  if (!arrangement) digits.front().sums = block_sums_of(builder, symbol, digits.front());
  digits = arranged_digits(arrangement, builder, symbol, std::move(digits));
  if (kernel.isa == Isa::amx || kernel.isa == Isa::avx2)
    builder.need_scratch(panel_scratch_floats(depth_blocks));
  const ValueId out = builder.float_rows(symbol, columns);
  std::vector<ValueId> uses = {packed,          block_scales,      out,
                               outliers.counts, outliers.channels, outliers.values};
  for (const Digit& digit : digits) std::ranges::copy(digit.uses(), std::back_inserter(uses));
  if (bias) uses.push_back(*bias);
  if (residual) uses.push_back(*residual);
  AddBlockOutliersFunction* add_outliers = select_kernel(add_outliers_f32_u4block).function;
  const std::size_t multiplying = builder.part("block_linear"), adding = builder.part("add_outliers");
  builder.add_loop([blocks](const Frame&) { return blocks; }, blocks_per_panel(kernel), "block_linear", uses,
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                     const BlockGemmArgs args = {
                         .left = nullptr,
                         .left_scales = nullptr,
                         .left_sums = nullptr,
                         .right = frame.get<const std::uint8_t>(packed),
                         .right_scales = frame.get<const std::uint16_t>(block_scales),
                         .bias = bias ? frame.get<const float>(*bias) : nullptr,
                         .residual = residual ? frame.get<const float>(*residual) : nullptr,
                         .out = frame.get<float>(out),
                         .rows = frame.size_of(symbol),
                         .columns = columns,
                         .depth_blocks = depth_blocks,
                         .residual_stride = columns,
                         .out_stride = columns,
                         .scratch = scratch};
                     const auto add = [&](std::size_t block, std::size_t block_end) {
                       frame.lap(multiplying);
                       add_outliers({.outliers = outliers.in(frame),
                                     .right = args.right,
                                     .right_scales = args.right_scales,
                                     .out = args.out,
                                     .rows = args.rows,
                                     .columns = columns,
                                     .depth_blocks = depth_blocks},
                                    block, block_end);
                       frame.lap(adding);
                     };
                     multiply_panels(kernel, args, frame, digits, begin, end, add);
                   });
  return out;
}

}  // namespace chunkrt
