#include "program/operators/activations.h"

#include <cmath>
#include <map>
#include <tuple>

#include "kernels/gemm/parted.h"
#include "program/sizes.h"

namespace chunkrt {
namespace {

struct Activations {
  std::map<ValueId, Outliers> outliers;
  std::map<std::tuple<ValueId, std::size_t, std::optional<float>>, std::vector<Digit>> digits;
  std::map<std::pair<ValueId, ArrangeRowsFunction*>, ValueId> arranged;  // by a digit's values
};

Shape with_width(Shape shape, std::size_t width) {
  shape.back() = fixed(width);
  return shape;
}

Shape without_width(Shape shape) {
  shape.pop_back();
  return shape;
}

Digit quantize(ProgramBuilder& builder, ValueId input) {
  const Digit out = digit_for(builder, builder.value(input).shape);
  const std::size_t width = builder.width_of(input);
  QuantizeFunction* kernel = select_kernel(quantize_s8row_f32).function;
  builder.add_row_step(builder.rows_of(input, "linear's input"), "quantize",
                       {input, out.values, out.scales, out.sums},
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

std::vector<Digit> quantize_on_grid(ProgramBuilder& builder, ValueId input, float step,
                                    std::size_t num_digits) {
  std::vector<Digit> digits;
  std::vector<ValueId> uses = {input};
  for (std::size_t i = 0; i < num_digits; ++i) {
    const Digit digit = digit_for(builder, builder.value(input).shape);
    uses.insert(uses.end(), {digit.values, digit.scales, digit.sums});
    digits.push_back(digit);
  }
  const std::size_t width = builder.width_of(input);
  GridQuantizeFunction* kernel = select_kernel(quantize_s8grid_f32).function;
  builder.add_row_step(builder.rows_of(input, "linear's input"), "quantize", uses,
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         const auto target = [&frame](const Digit& digit) {
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

}  // namespace

RowOutliers Outliers::in(const Frame& frame) const {
  return {.counts = frame.get<std::int32_t>(counts),
          .channels = frame.get<std::int32_t>(channels),
          .values = frame.get<float>(values),
          .capacity = capacity};
}

Digit digit_for(ProgramBuilder& builder, Shape shape) {
  const Shape of_rows = without_width(shape);
  return {.values = builder.temporary(Dtype::int8, with_width(shape, padded_depth(shape.back().size))),
          .scales = builder.temporary(Dtype::float32, of_rows),
          .sums = builder.temporary(Dtype::int32, of_rows)};
}

Outliers outliers_for(ProgramBuilder& builder, Shape shape) {
  const std::size_t capacity = most_outliers(shape.back().size);
  return {.rest = builder.temporary(Dtype::float32, shape),
          .counts = builder.temporary(Dtype::int32, without_width(shape)),
          .channels = builder.temporary(Dtype::int32, with_width(shape, capacity)),
          .values = builder.temporary(Dtype::float32, with_width(shape, capacity)),
          .capacity = capacity};
}

const Outliers& outliers_of(ProgramBuilder& builder, ValueId input) {
  auto& made = builder.notes<Activations>().outliers;
  if (const auto found = made.find(input); found != made.end()) return found->second;
  const Symbol symbol = builder.rows_of(input, "linear's input");
  const std::size_t width = builder.width_of(input);
  const Outliers out = outliers_for(builder, builder.value(input).shape);
  TakeOutliersFunction* kernel = select_kernel(take_outliers_f32_f32).function;
  builder.add_row_step(symbol, "take_outliers", {input, out.rest, out.counts, out.channels, out.values},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         kernel({.input = frame.get<const float>(input),
                                 .rest = frame.get<float>(out.rest),
                                 .outliers = out.in(frame),
                                 .width = width},
                                begin, end);
                       });
  return made[input] = out;
}

const std::vector<Digit>& digits_of(ProgramBuilder& builder, ValueId input, std::size_t num_digits,
                                    std::optional<float> step) {
  require(num_digits == 1 || (num_digits == 2 && step),
          "linear: expected 1 digit of activations, or up to 2 on a grid, got " + std::to_string(num_digits));
  auto& made = builder.notes<Activations>().digits;
  const auto key = std::tuple(input, num_digits, step);
  if (const auto found = made.find(key); found != made.end()) return found->second;
  return made[key] = step ? quantize_on_grid(builder, input, *step, num_digits)
                          : std::vector{quantize(builder, outliers_of(builder, input).rest)};
}

std::vector<ValueId> Digit::uses() const {
  std::vector<ValueId> all = {values, scales, sums};
  if (arranged) all.push_back(*arranged);
  return all;
}

std::optional<RowArrangement> row_arrangement([[maybe_unused]] const KernelRow<GemmFunction>& kernel) {
  CHUNKRT_ON_X86(if (kernel.isa == Isa::avx2) {
    return RowArrangement{.arrange = part_rows_avx2, .row_bytes = parted_row_bytes, .rows_together = 1};
  })
  CHUNKRT_ON_ARM(if (kernel.isa == Isa::neon_i8mm) {
    return RowArrangement{.arrange = pair_rows_neon_i8mm, .row_bytes = paired_row_bytes, .rows_together = 2};
  })
  return {};
}

std::optional<RowArrangement> row_arrangement([[maybe_unused]] const KernelRow<BlockGemmFunction>& kernel) {
  CHUNKRT_ON_ARM(if (kernel.isa == Isa::neon_i8mm) {
    return RowArrangement{
        .arrange = pair_block_rows_neon_i8mm, .row_bytes = paired_block_row_bytes, .rows_together = 2};
  })
  return {};
}

std::vector<Digit> arranged_digits(const std::optional<RowArrangement>& arrangement, ProgramBuilder& builder,
                                   Symbol rows, std::vector<Digit> digits) {
  if (!arrangement) return digits;
  auto& made = builder.notes<Activations>().arranged;
  for (Digit& digit : digits) {
    if (const auto found = made.find({digit.values, arrangement->arrange}); found != made.end()) {
      digit.arranged = found->second;
      continue;
    }
    const Shape shape = builder.value(digit.values).shape;
    const std::size_t groups = shape.back().size / kGemmDepthPerGroup;
    const std::size_t per_row = shape.size() == 3 ? shape[1].size : 1;
    // Complete pairs, if rows come in pairs.
    const std::size_t most_rows = round_up(builder.max_rows() * per_row, arrangement->rows_together);
    const ValueId arranged =
        builder.temporary(Dtype::int8, {fixed(most_rows), fixed(arrangement->row_bytes(groups))});
    builder.add_row_step(
        rows, "arrange_rows", {digit.values, arranged},
        [=, values = digit.values](const Frame& frame, std::size_t begin, std::size_t end, float*) {
          arrangement->arrange(frame.get<const std::int8_t>(values), groups, begin * per_row, end * per_row,
                               frame.get<std::int8_t>(arranged));
        });
    digit.arranged = made[{digit.values, arrangement->arrange}] = arranged;
  }
  return digits;
}

void require_step(float step, const std::string& what) {
  require(std::isfinite(step) && step > 0.0f,
          what + ": expected a finite number above 0, got " + std::to_string(step));
}

void require_addends(const ProgramBuilder& builder, std::optional<ValueId> bias,
                     std::optional<ValueId> residual, Symbol rows, std::size_t columns,
                     const std::string& linear) {
  if (bias) builder.require_constant(*bias, Dtype::float32, {fixed(columns)}, linear + "'s bias");
  if (!residual) return;
  require(
      builder.rows_of(*residual, linear + "'s residual") == rows && builder.width_of(*residual) == columns,
      linear + ": the residual's shape differs from the result's");
}

}  // namespace chunkrt
