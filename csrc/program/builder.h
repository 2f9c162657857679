// Puts a program together, operator by operator. Each operator checks its operands and appends steps; its
// result is a value for the operators after it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/outliers/outliers.h"
#include "program/program.h"

namespace chunkrt {

struct AttentionShape {
  std::size_t num_heads;
  std::size_t num_kv_heads;
  std::size_t head_dim;
  float scale;
  std::size_t window = 0;     // 0: none
  bool has_raw_keys = false;  // the cache holds keys before rotary embedding
};

// Of q | k | v: num_k_heads heads of head_k_dim in q and in k, num_v_heads of head_v_dim in v.
struct DeltaRuleShape {
  std::size_t num_k_heads;
  std::size_t num_v_heads;  // a multiple of num_k_heads
  std::size_t head_k_dim;
  std::size_t head_v_dim;
  bool use_qk_l2norm;  // q and k of each head are multiplied by rsqrt(sum of their squares + 1e-6)
};

// Values of the operators are float32 [T, width] or [R, width], constants as each says. Every function throws
// std::invalid_argument for operands that do not fit.
class ProgramBuilder {
 public:
  // `max_rows`: the most rows that T and R may count in a run, at least 1.
  ProgramBuilder(std::shared_ptr<ThreadPool> pool, std::size_t max_rows);

  ValueId input(std::string name, Dtype dtype, Shape shape);
  // An input that is updated in place, float32. A cache of attention may in each run be float16 as well, or
  // int8 with 4 columns more: see kernels/attention/attention.h.
  ValueId state(std::string name, Shape shape);
  // `data` is not copied; `owner` keeps it alive as long as the program.
  ValueId constant(const void* data, Dtype dtype, const std::vector<std::size_t>& shape,
                   std::shared_ptr<const void> owner);
  // Lets the caller receive an operator's result. A value can be one output.
  void output(std::string name, ValueId value);

  // Rows of table (constant float32 or float16 [V, H], or a value [T, H]) at int64 indices [T] or [R] (an
  // input).
  ValueId gather(ValueId table, ValueId indices);
  // See kernels/norm/norm.h; weight float32 [width].
  ValueId rms_norm(ValueId input, ValueId weight, float epsilon);
  // rms_norm of each of the first n slices of D columns with its own row of a weight float32 [n, D]; the
  // columns after them pass through.
  ValueId head_norm(ValueId input, ValueId weight, float epsilon);
  // input @ weight, activations quantised to int8 a row: see kernels/quantize and kernels/gemm. packed int8
  // [ceil(N / 16), ceil(K / 4), 16, 4], scales float32 [N], bias float32 [N], residual a value [rows, N].
  // The few large values of a row are left out of that and multiplied in float32: see kernels/outliers.
  // With an input step (finite, above 0) the activations of all rows are on its grid instead, as integers q
  // of 8 bits or, in two digits, 16: the result is float(q @ weight) * (input_step * scales), without bias or
  // residual. Each operation rounds once; q @ weight does so where each digit's part of it is within 2^24.
  ValueId linear(ValueId input, ValueId packed, ValueId scales, std::optional<ValueId> bias,
                 std::optional<ValueId> residual, std::size_t num_digits,
                 std::optional<float> input_step = {});
  // input @ weight in float32, a constant float32 [K, N]: see kernels/float_linear/float_linear.h.
  ValueId float_linear(ValueId input, ValueId weight);
  // input @ weight in 4-bit blocks, activations quantised as linear does without an input step: see
  // kernels/block_gemm/block_gemm.h. The input's width K is a multiple of 32. packed uint8
  // [ceil(N / 16), K / 32, 4, 16, 4], block_scales float16 [ceil(N / 16), K / 32, 2, 16], `columns` is N;
  // bias and residual are as in linear.
  ValueId block_linear(ValueId input, ValueId packed, ValueId block_scales, std::size_t columns,
                       std::optional<ValueId> bias, std::optional<ValueId> residual);
  // What saturation takes from a linear of one digit on the grid of `input_step`, times its weight: see
  // kernels/shadow/shadow.h. Beside that linear's operands, hot_channels int32 [H], ascending: rows of the
  // weight that the program keeps in float32. Others are dequantised in every run that finds outliers in
  // their channel.
  ValueId shadow_linear(ValueId input, ValueId packed, ValueId scales, float input_step,
                        ValueId hot_channels);
  // The sum of the feed-forwards that a router picks for each row, the experts of its top_k largest
  // router_logits [rows, E] (of equals the first), weighted by the softmax over all of these; with
  // norm_topk_prob the weights of the picked are divided by their sum. Weights as in linear, with an axis [E]
  // before: gate_up with scales [E, 2 * I], columns gate | up, and down with scales [E, width]. Rows are
  // quantised as linear does without an input step, before each product.
  ValueId routed_experts(ValueId hidden, ValueId router_logits, ValueId gate_up, ValueId gate_up_scales,
                         ValueId down, ValueId down_scales, std::size_t top_k, bool norm_topk_prob);
  // left + right, left * right; right has left's shape or is a constant float32 [width]; that of mul may also
  // be a column [rows, 1].
  ValueId add(ValueId left, ValueId right);
  ValueId mul(ValueId left, ValueId right);
  // See kernels/elementwise/elementwise.h; gelu is its tanh form.
  ValueId sigmoid(ValueId input);
  ValueId gelu(ValueId input);
  ValueId softplus(ValueId input);
  ValueId tanh(ValueId input);
  // clip(round_half_to_even(input / step), -levels, levels) * step, constant step float32 [1] or [width].
  ValueId round_to_grid(ValueId input, ValueId step, std::size_t levels);
  // input [rows, 2 * I] holds gate | up: silu(gate) * up or gelu(gate) * up, [rows, I].
  ValueId silu_mul(ValueId input);
  ValueId gelu_mul(ValueId input);
  // Columns [begin, begin + width), copied.
  ValueId columns(ValueId input, std::size_t begin, std::size_t width);
  // See kernels/attention/attention.h; qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], position and
  // table_row int64 [1] (inputs, or one for both), cos and sin constant float32 [context, rotary_dim / 2],
  // caches states [num_kv_heads, P, head_dim], or with a window [num_kv_heads, W, head_dim]: rings.
  ValueId attention(ValueId qkv, ValueId position, ValueId table_row, ValueId cos, ValueId sin,
                    ValueId key_cache, ValueId value_cache, const AttentionShape& shape);
  // See kernels/linear_attention/linear_attention.h; rows are T. bcx [T, 3 * C] holds the gate before, the
  // gate after, and x. conv_weight constant float32 [C, 1, taps], conv_bias [C], conv_state a state [C, taps
  // - 1]. The result is [T, C].
  ValueId short_conv(ValueId bcx, ValueId conv_weight, std::optional<ValueId> conv_bias, ValueId conv_state);
  // qkv [T, C] passes through the convolution, without gates, and SiLU. Then the gated delta rule, q scaled
  // by head_k_dim^-1/2: gate (the logarithm of the decay) and beta [T, num_v_heads], recurrent_state a state
  // [num_v_heads, head_k_dim, head_v_dim]. The result is [T, num_v_heads * head_v_dim].
  ValueId gated_delta_rule(ValueId qkv, ValueId gate, ValueId beta, ValueId conv_weight,
                           std::optional<ValueId> conv_bias, ValueId conv_state, ValueId recurrent_state,
                           const DeltaRuleShape& shape);

  // The builder is spent afterwards.
  std::unique_ptr<Program> build();

 private:
  struct Quantized {
    ValueId values;
    ValueId scales;
    ValueId sums;
  };

  struct Outliers {
    ValueId rest;
    ValueId counts;
    ValueId channels;
    ValueId values;
    std::size_t capacity;
    RowOutliers in(const Frame& frame) const;
  };

  // What becomes of the rows that a router sends to experts: see routed_experts.cc. `weights` and `slots` are
  // [rows, top_k], `rows` is by slot, `begins` has the first slot of each expert and the end of the last.
  struct Routing {
    Symbol symbol;
    std::size_t num_experts;
    std::size_t top_k;
    ValueId weights;
    ValueId begins;
    ValueId slots;
    ValueId rows;
  };
  // What is multiplied: int8 rows, and what was too large for them.
  struct SlotRows {
    Quantized quantized;
    Outliers outliers;
  };
  using RowOfSlot = std::function<const float*(const Frame& frame, std::size_t slot, float* scratch)>;

  const Value& value(ValueId id) const;
  ValueId add_value(Value value);
  // A constant float32 [size] that the program owns.
  ValueId floats(std::vector<float> values);
  ValueId temporary(Dtype dtype, Shape shape);
  // The symbol and the width of a value float32 [symbol, width].
  Symbol rows_of(ValueId id, const char* what) const;
  std::size_t width_of(ValueId id) const { return value(id).shape.back().size; }
  void require(bool condition, const std::string& message) const;
  void require_constant(ValueId id, Dtype dtype, const Shape& shape, const char* what) const;
  void require_state(ValueId id, const Shape& shape, const char* what) const;
  void require_step(float step, const char* what) const;
  // What a linear of that name adds to its result [rows, columns].
  void require_addends(std::optional<ValueId> bias, std::optional<ValueId> residual, Symbol rows,
                       std::size_t columns, const std::string& linear) const;

  void use(const std::vector<ValueId>& values);
  // Appends a step over rows to the last stage if that runs over the same rows, else to a new stage.
  void add_row_step(Symbol rows, const std::vector<ValueId>& uses, Step step);
  void add_stage(std::function<std::size_t(const Frame&)> num_items, std::size_t piece_multiple,
                 const std::vector<ValueId>& uses, Step step);
  ValueId binary(ValueId left, ValueId right, const char* what,
                 void (*kernel)(const float*, const float*, float*, std::size_t));
  ValueId unary(ValueId input, const char* what, void (*kernel)(const float*, float*, std::size_t));
  ValueId gated(ValueId input, const char* what,
                void (*kernel)(const float*, const float*, float*, std::size_t));
  ValueId convolution(ValueId input, std::size_t columns_per_channel, ValueId weight,
                      std::optional<ValueId> bias, ValueId conv_state);
  ValueId l2_normalised(ValueId qkv, std::size_t num_k_heads, std::size_t k_dim);
  Quantized quantized_rows(ValueId input);
  Quantized quantize(ValueId input);
  // What is large in a value's rows, and the rest; made once. See kernels/outliers/outliers.h.
  const Outliers& outliers_of(ValueId input);
  std::vector<Quantized> quantize_on_grid(ValueId input, float step, std::size_t num_digits);
  // The int8 rows that stand for a value, each made once; on the grid of a step if there is one.
  std::vector<Quantized> digits_of(ValueId input, std::size_t num_digits, std::optional<float> step);
  Routing route(ValueId router_logits, std::size_t top_k, bool norm_topk_prob);
  SlotRows quantize_slots(const Routing& routing, std::size_t width, std::vector<ValueId> uses,
                          RowOfSlot row_of);
  // float32 [rows, top_k, columns], by slot.
  ValueId multiply_slots(const Routing& routing, const SlotRows& left, std::size_t depth, ValueId packed,
                         ValueId scales);
  // int32 [rows, width / 32]: the sums of the blocks of a digit's rows, made once.
  ValueId block_sums_of(Symbol rows, const Quantized& digit);

  std::shared_ptr<ThreadPool> pool_;
  ProgramDefinition definition_;
  std::map<std::tuple<ValueId, std::size_t, std::optional<float>>, std::vector<Quantized>> digits_;
  std::map<ValueId, Outliers> outliers_;
  std::map<ValueId, ValueId> block_sums_;  // by the digit's values
  bool is_built_ = false;
};

}  // namespace chunkrt
