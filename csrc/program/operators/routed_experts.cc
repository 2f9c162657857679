// routed_experts: for each row, the weighted sum of the results of the few experts that a router picks.
//
// A slot is the assignment of a row to one expert. Slots of an expert are adjacent, so that all rows of the
// expert are multiplied by its weights at once. The results of a row are added in ascending order of experts,
// so that the sum does not depend on the other rows of the chunk.
#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "kernels/dispatch.h"
#include "program/operators/activations.h"
#include "program/operators/operators.h"
#include "program/operators/panels.h"

namespace chunkrt {
namespace {

// The assignment of rows to experts. `weights` and `slots` are [rows, top_k], `rows` is indexed by slot, and
// `begins` contains the first slot of each expert and the end of the last expert's slots.
struct Routing {
  Symbol symbol;
  std::size_t num_experts;
  std::size_t top_k;
  ValueId weights;
  ValueId begins;
  ValueId slots;
  ValueId rows;
};

// The factors: int8 rows, and their outliers.
struct SlotRows {
  Digit digit;
  Outliers outliers;
};

struct RouterKernels {
  UnaryFunction* exp;
  UnaryFunction* sigmoid;
};

using RowOfSlot = std::function<const float*(const Frame& frame, std::size_t slot, float* scratch)>;

// Picks the top_k largest values, in ascending order of experts; of equal values, the first wins.
void pick(const float* logits, std::size_t num_experts, std::int32_t* picked, std::size_t top_k) {
  std::size_t count = 0;  // so far, the largest first
  for (std::size_t expert = 0; expert < num_experts; ++expert) {
    if (count == top_k && !(logits[expert] > logits[picked[top_k - 1]])) continue;
    std::size_t place = count < top_k ? count++ : top_k - 1;
    for (; place > 0 && logits[expert] > logits[picked[place - 1]]; --place)
      picked[place] = picked[place - 1];
    picked[place] = static_cast<std::int32_t>(expert);
  }
  std::sort(picked, picked + top_k);
}

// The sum of the `count` largest of `size` values, which it reorders, in descending order.
float sum_of_largest(float* values, std::size_t size, std::size_t count) {
  std::partial_sort(values, values + count, values + size, std::greater<float>());
  float sum = 0.0f;
  for (std::size_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// Replaces the values of experts outside of the best groups by minus infinity; of equal groups, the first
// wins. `ranks` holds num_groups values, and `scratch` those of a group.
void close_groups(float* values, std::size_t num_experts, const RouterRule& rule, float* ranks,
                  float* scratch) {
  const std::size_t size = num_experts / rule.num_groups;
  for (std::size_t group = 0; group < rule.num_groups; ++group) {
    std::copy_n(values + group * size, size, scratch);
    ranks[group] = sum_of_largest(scratch, size, rule.best_of_group);
  }
  for (std::size_t group = 0; group < rule.num_groups; ++group) {
    std::size_t num_better = 0;
    for (std::size_t other = 0; other < rule.num_groups; ++other) {
      num_better += ranks[other] > ranks[group] || (other < group && ranks[other] == ranks[group]);
    }
    if (num_better < rule.top_groups) continue;
    std::fill_n(values + group * size, size, -std::numeric_limits<float>::infinity());
  }
}

// Computes the scores of all experts: the softmax over them, or the sigmoid of each.
void score(const float* logits, std::size_t num_experts, bool use_sigmoid, const RouterKernels& kernels,
           float* scores) {
  if (use_sigmoid) return kernels.sigmoid(logits, scores, num_experts);
  const float largest = *std::max_element(logits, logits + num_experts);
  for (std::size_t expert = 0; expert < num_experts; ++expert) scores[expert] = logits[expert] - largest;
  kernels.exp(scores, scores, num_experts);
  float sum = 0.0f;
  for (std::size_t expert = 0; expert < num_experts; ++expert) sum += scores[expert];
  for (std::size_t expert = 0; expert < num_experts; ++expert) scores[expert] /= sum;
}

// Keeps the scores of the picked experts.
void weigh(const float* scores, const std::int32_t* picked, const RouterRule& rule, float* weights) {
  float sum = 0.0f;
  for (std::size_t i = 0; i < rule.top_k; ++i) sum += weights[i] = scores[picked[i]];
  if (!rule.norm_topk_prob) return;
  for (std::size_t i = 0; i < rule.top_k; ++i) weights[i] /= sum + rule.norm_epsilon;
}

// Sorts slots by expert, and by row within an expert. begins [num_experts + 1] receives the first slots of
// the experts, slots [count] the slot of each pick, and rows [count] the row of each slot.
void group(const std::int32_t* picked, std::size_t count, std::size_t top_k, std::size_t num_experts,
           std::int32_t* begins, std::int32_t* slots, std::int32_t* rows) {
  std::fill_n(begins, num_experts + 1, 0);
  for (std::size_t i = 0; i < count; ++i) ++begins[picked[i]];
  for (std::size_t expert = 0; expert < num_experts; ++expert) begins[expert + 1] += begins[expert];
  for (std::size_t i = count; i-- > 0;) {  // from each expert's end to its begin
    slots[i] = --begins[picked[i]];
    rows[slots[i]] = static_cast<std::int32_t>(i / top_k);
  }
}

RowOutliers from_slot(const RowOutliers& outliers, std::size_t slot) {
  return {.counts = outliers.counts + slot,
          .channels = outliers.channels + slot * outliers.capacity,
          .values = outliers.values + slot * outliers.capacity,
          .capacity = outliers.capacity};
}

Routing route(ProgramBuilder& builder, ValueId router_logits, std::optional<ValueId> selection_bias,
              const RouterRule& rule) {
  const std::size_t top_k = rule.top_k;
  const Symbol symbol = builder.rows_of(router_logits, "routed_experts' router logits");
  const std::size_t num_experts = builder.width_of(router_logits);
  require(top_k >= 1 && top_k <= num_experts, "routed_experts: " + std::to_string(top_k) + " of " +
                                                  std::to_string(num_experts) + " experts cannot be picked");
  require(builder.max_rows() <= std::numeric_limits<std::int32_t>::max() / top_k,
          "routed_experts: " + std::to_string(builder.max_rows()) + " rows exceed the range of slot numbers");
  const Shape of_slots = {rows_dimension(symbol), fixed(top_k)};
  const Routing routing = {.symbol = symbol,
                           .num_experts = num_experts,
                           .top_k = top_k,
                           .weights = builder.temporary(Dtype::float32, of_slots),
                           .begins = builder.temporary(Dtype::int32, {fixed(num_experts + 1)}),
                           .slots = builder.temporary(Dtype::int32, of_slots),
                           .rows = builder.temporary(Dtype::int32, of_slots)};
  const ValueId picked = builder.temporary(Dtype::int32, of_slots);
  const std::size_t num_groups = rule.num_groups;
  require(num_groups >= 1 && num_experts % num_groups == 0, "routed_experts: " + std::to_string(num_experts) +
                                                                " experts cannot form " +
                                                                std::to_string(num_groups) + " groups");
  const std::size_t group_size = num_experts / num_groups;
  require(rule.best_of_group >= 1 && rule.best_of_group <= group_size && rule.top_groups <= num_groups &&
              top_k <= rule.top_groups * group_size,
          "routed_experts: " + std::to_string(top_k) + " experts of " + std::to_string(rule.top_groups) +
              " groups of " + std::to_string(group_size) + " cannot be picked by the " +
              std::to_string(rule.best_of_group) + " best of each group");
  builder.need_scratch(3 * num_experts + num_groups);
  const RouterKernels kernels = {.exp = select_kernel(exp_f32_f32).function,
                                 .sigmoid = select_kernel(sigmoid_f32_f32).function};
  std::vector<ValueId> uses = {router_logits, picked, routing.weights};
  if (selection_bias) {
    builder.require_constant(*selection_bias, Dtype::float32, {fixed(num_experts)},
                             "routed_experts' selection bias");
    uses.push_back(*selection_bias);
  }
  builder.add_row_step(symbol, "route", uses,
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                         float* sums = scratch + num_experts;  // scores and selection bias
                         for (std::size_t row = begin; row < end; ++row) {
                           const float* logits = frame.get<const float>(router_logits) + row * num_experts;
                           score(logits, num_experts, rule.use_sigmoid, kernels, scratch);
                           const float* values = rule.use_sigmoid ? scratch : logits;
                           if (selection_bias) {
                             const float* bias = frame.get<const float>(*selection_bias);
                             for (std::size_t i = 0; i < num_experts; ++i) sums[i] = scratch[i] + bias[i];
                             values = sums;
                           }
                           if (num_groups > 1) {
                             if (!selection_bias) std::copy_n(scratch, num_experts, sums);
                             float* of_group = sums + num_experts;
                             close_groups(sums, num_experts, rule, of_group + num_experts, of_group);
                             values = sums;
                           }
                           std::int32_t* of_row = frame.get<std::int32_t>(picked) + row * top_k;
                           pick(values, num_experts, of_row, top_k);
                           weigh(scratch, of_row, rule, frame.get<float>(routing.weights) + row * top_k);
                         }
                       });
  builder.add_loop([](const Frame&) { return std::size_t{1}; }, 1, "route",
                   {picked, routing.begins, routing.slots, routing.rows},
                   [=](const Frame& frame, std::size_t, std::size_t, float*) {
                     group(frame.get<const std::int32_t>(picked), frame.size_of(symbol) * top_k, top_k,
                           num_experts, frame.get<std::int32_t>(routing.begins),
                           frame.get<std::int32_t>(routing.slots), frame.get<std::int32_t>(routing.rows));
                   });
  return routing;
}

// `row_of` returns the float row of a slot, and may build it in the scratch that it receives.
SlotRows quantize_slots(ProgramBuilder& builder, const Routing& routing, std::size_t width,
                        std::vector<ValueId> uses, const std::string& making_name, RowOfSlot row_of) {
  const std::size_t padded = padded_depth(width);
  const Shape of_width = {rows_dimension(routing.symbol), fixed(routing.top_k), fixed(width)};
  const Digit out = digit_for(builder, of_width);
  const Outliers outliers = outliers_for(builder, of_width);
  uses.insert(uses.end(), {out.values, out.scales, out.sums, outliers.rest, outliers.counts,
                           outliers.channels, outliers.values});
  builder.need_scratch(width);
  TakeOutliersFunction* take = select_kernel(take_outliers_f32_f32).function;
  const std::size_t making = builder.part(making_name), taking = builder.part("take_outliers"),
                    quantizing = builder.part("quantize");
  QuantizeFunction* kernel = select_kernel(quantize_s8row_f32).function;
  builder.add_loop(
      [=](const Frame& frame) { return frame.size_of(routing.symbol) * routing.top_k; }, 1, "quantize", uses,
      [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
        for (std::size_t slot = begin; slot < end; ++slot) {
          const float* row = row_of(frame, slot, scratch);
          frame.lap(making);
          float* rest = frame.get<float>(outliers.rest) + slot * width;
          take({.input = row, .rest = rest, .outliers = from_slot(outliers.in(frame), slot), .width = width},
               0, 1);
          frame.lap(taking);
          kernel({.input = rest,
                  .values = frame.get<std::int8_t>(out.values) + slot * padded,
                  .scales = frame.get<float>(out.scales) + slot,
                  .sums = frame.get<std::int32_t>(out.sums) + slot,
                  .width = width,
                  .padded_width = padded},
                 0, 1);
          frame.lap(quantizing);
        }
      });
  return {.digit = out, .outliers = outliers};
}

ValueId multiply_slots(ProgramBuilder& builder, const Routing& routing, const SlotRows& left,
                       std::size_t depth, ValueId packed, ValueId scales, std::optional<ValueId> bias) {
  const std::size_t columns = builder.value(scales).shape.back().size;
  const std::size_t groups = ceil_divide(depth, kGemmDepthPerGroup);
  const std::size_t blocks = ceil_divide(columns, kGemmColumnsPerBlock);
  require(depth <= kGemmMaxDepth, "routed_experts: " + std::to_string(depth) +
                                      " inputs are too many to sum in int32; at most " +
                                      std::to_string(kGemmMaxDepth) + " are");
  builder.require_constant(scales, Dtype::float32, {fixed(routing.num_experts), fixed(columns)},
                           "routed_experts' scales");
  builder.require_constant(packed, Dtype::int8,
                           {fixed(routing.num_experts), fixed(blocks), fixed(groups),
                            fixed(kGemmColumnsPerBlock), fixed(kGemmDepthPerGroup)},
                           "routed_experts' packed weight");
  if (bias) {
    builder.require_constant(*bias, Dtype::float32, {fixed(routing.num_experts), fixed(columns)},
                             "routed_experts' bias");
  }
  const ValueId out = builder.temporary(
      Dtype::float32, {rows_dimension(routing.symbol), fixed(routing.top_k), fixed(columns)});
  const KernelRow<GemmFunction>& kernel = select_kernel(gemm_f32_s8row_s8col);
  AddOutliersFunction* add_outliers = select_kernel(add_outliers_f32_s8col).function;
  const std::size_t multiplying = builder.part("routed_experts"), adding = builder.part("add_outliers");
  const std::optional<RowArrangement> arrangement = row_arrangement(kernel);
  const Digit digit = arranged_digits(arrangement, builder, routing.symbol, {left.digit}).front();
  std::vector<ValueId> uses = digit.uses();
  uses.insert(uses.end(), {left.outliers.counts, left.outliers.channels, left.outliers.values, routing.begins,
                           packed, scales, out});
  if (bias) uses.push_back(*bias);
  // A piece consists of some columns for all experts, so that its work does not depend on the router.
  builder.add_loop(
      [blocks](const Frame&) { return blocks; }, blocks_per_panel(kernel), "routed_experts", uses,
      [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
        const std::int32_t* begins = frame.get<const std::int32_t>(routing.begins);
        for (std::size_t expert = 0; expert < routing.num_experts; ++expert) {
          const auto first = static_cast<std::size_t>(begins[expert]);
          const std::size_t num_rows = static_cast<std::size_t>(begins[expert + 1]) - first;
          if (num_rows == 0) continue;
          const std::int8_t* right =
              frame.get<const std::int8_t>(packed) + expert * blocks * groups * kGemmBytesPerGroup;
          const float* right_scales = frame.get<const float>(scales) + expert * columns;
          float* results = frame.get<float>(out) + first * columns;
          const std::int8_t* arranged = nullptr;
          if (arrangement && first % arrangement->rows_together == 0) {
            arranged = frame.get<const std::int8_t>(*digit.arranged) + first * arrangement->row_bytes(groups);
          }
          kernel.function(
              {.left = frame.get<const std::int8_t>(digit.values) + first * groups * kGemmDepthPerGroup,
               .left_scales = frame.get<const float>(digit.scales) + first,
               .left_sums = frame.get<const std::int32_t>(digit.sums) + first,
               .right = right,
               .right_scales = right_scales,
               .bias = bias ? frame.get<const float>(*bias) + expert * columns : nullptr,
               .residual = nullptr,
               .out = results,
               .rows = num_rows,
               .columns = columns,
               .groups = groups,
               .residual_stride = columns,
               .out_stride = columns,
               .arranged = arranged},
              begin, end);
          frame.lap(multiplying);
          add_outliers({.outliers = from_slot(left.outliers.in(frame), first),
                        .packed = right,
                        .scales = right_scales,
                        .out = results,
                        .rows = num_rows,
                        .columns = columns,
                        .groups = groups},
                       begin, end);
          frame.lap(adding);
        }
      });
  return out;
}

}  // namespace

ValueId routed_experts(ProgramBuilder& builder, ValueId hidden, ValueId router_logits, ValueId gate_up,
                       ValueId gate_up_scales, ValueId down, ValueId down_scales,
                       std::optional<ValueId> selection_bias, const RouterRule& rule,
                       const ExpertBiases& biases, const ExpertActivation& activation) {
  const Symbol symbol = builder.rows_of(hidden, "routed_experts' input");
  const std::size_t width = builder.width_of(hidden);
  require(builder.rows_of(router_logits, "routed_experts' router logits") == symbol,
          "routed_experts: the router logits differ from the input in their rows");
  for (const ValueId scales : {gate_up_scales, down_scales}) {
    require(builder.value(scales).shape.size() == 2,
            "routed_experts: expected scales float32 [E, N], got " +
                describe(builder.value(scales).dtype, builder.value(scales).shape));
  }
  const std::size_t both = builder.width_of(gate_up_scales), inner = both / 2;
  require(both % 2 == 0 && both > 0 && builder.width_of(down_scales) == width,
          "routed_experts: expected an even number of columns of gate and up, and " + std::to_string(width) +
              " of down, got " + std::to_string(both) + " and " +
              std::to_string(builder.width_of(down_scales)));

  const Routing routing = route(builder, router_logits, selection_bias, rule);
  const SlotRows rows = quantize_slots(
      builder, routing, width, {hidden, routing.rows}, "gather",
      [=](const Frame& frame, std::size_t slot, float*) {
        const auto row = static_cast<std::size_t>(frame.get<const std::int32_t>(routing.rows)[slot]);
        return frame.get<const float>(hidden) + row * width;
      });
  const ValueId gates_and_ups =
      multiply_slots(builder, routing, rows, width, gate_up, gate_up_scales, biases.gate_up);
  const auto [alpha, limit, uses_gelu] = activation;
  require(limit >= 0.0f,
          "routed_experts: expected a limit above 0, or 0 for none, got " + std::to_string(limit));
  BinaryFunction* activate = select_kernel(uses_gelu ? gelu_mul_f32_f32_f32 : silu_mul_f32_f32_f32).function;
  ClampedSwigluFunction* clamped_swiglu = select_kernel(clamped_swiglu_f32_f32_f32).function;
  const char* const name = limit > 0.0f ? "clamped_swiglu" : uses_gelu ? "gelu_mul" : "silu_mul";
  const SlotRows activated =
      quantize_slots(builder, routing, inner, {gates_and_ups}, name,
                     [=, alpha = alpha, limit = limit](const Frame& frame, std::size_t slot, float* scratch) {
                       const float* gate = frame.get<const float>(gates_and_ups) + slot * both;
                       if (limit > 0.0f) {
                         clamped_swiglu(gate, gate + inner, alpha, limit, scratch, inner);
                       } else {
                         activate(gate, gate + inner, scratch, inner);
                       }
                       return static_cast<const float*>(scratch);
                     });
  const ValueId results = multiply_slots(builder, routing, activated, inner, down, down_scales, biases.down);

  const ValueId out = builder.float_rows(symbol, width);
  builder.add_row_step(symbol, "add_experts", {results, routing.weights, routing.slots, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         for (std::size_t row = begin; row < end; ++row) {
                           float* sum = frame.get<float>(out) + row * width;
                           std::fill_n(sum, width, 0.0f);
                           for (std::size_t i = row * rule.top_k; i < (row + 1) * rule.top_k; ++i) {
                             const float weight = frame.get<const float>(routing.weights)[i];
                             const auto slot =
                                 static_cast<std::size_t>(frame.get<const std::int32_t>(routing.slots)[i]);
                             const float* result = frame.get<const float>(results) + slot * width;
                             for (std::size_t n = 0; n < width; ++n) sum[n] += weight * result[n];
                           }
                         }
                       });
  return out;
}

}  // namespace chunkrt
