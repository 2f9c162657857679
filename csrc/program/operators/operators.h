// Functions that append an operator to a program. Values are float32 [T, width] or [R, width]; each function
// documents its constants. Every function throws std::invalid_argument for operands that do not fit.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention.h"
#include "program/adapter_tables.h"
#include "program/builder.h"

namespace chunkrt {

// A constant table that holds consecutive rows of a larger one.
struct TableShare {
  std::size_t first;     // index of the table's first row in the larger table
  std::size_t all_rows;  // number of indices of the larger table
};

// Rows of table (constant float32 or float16 [V, H], or a value [T, H]) at int64 indices [T] or [R] (an
// input). If the table is a share, the indices are those of the larger table, and rows outside of the share
// are zeros.
ValueId gather(ProgramBuilder& builder, ValueId table, ValueId indices,
               std::optional<TableShare> share = std::nullopt);
// input [T, width] plus the rows of a constant table float32 [positions, width] from `position` on, int64 [1]
// (an input). A run whose positions exceed the table is refused.
ValueId add_positions(ProgramBuilder& builder, ValueId input, ValueId table, ValueId position);
// Columns [begin, begin + width), copied.
ValueId columns(ProgramBuilder& builder, ValueId input, std::size_t begin, std::size_t width);

// The columns of all inputs, which have the same rows, one input after another.
ValueId concat(ProgramBuilder& builder, const std::vector<ValueId>& inputs);

// The columns of the ranges [begin, end), one after another; columns from the input's width on are zeros.
ValueId pick_columns(ProgramBuilder& builder, ValueId input,
                     const std::vector<std::pair<std::size_t, std::size_t>>& ranges);

// See kernels/norm/norm.h; weight float32 [width].
ValueId rms_norm(ProgramBuilder& builder, ValueId input, ValueId weight, float epsilon);
ValueId layer_norm(ProgramBuilder& builder, ValueId input, ValueId weight, ValueId bias, float epsilon);
// rms_norm of the first n slices of D columns; each slice uses its own row of a weight float32 [n, D]. The
// columns after these slices are copied.
ValueId head_norm(ProgramBuilder& builder, ValueId input, ValueId weight, float epsilon);

// left + right, left * right; right has left's shape or is a constant float32 [width]. The right operand of
// mul may also be a column [rows, 1].
ValueId add(ProgramBuilder& builder, ValueId left, ValueId right);
ValueId mul(ProgramBuilder& builder, ValueId left, ValueId right);
// See kernels/elementwise/elementwise.h; gelu is its tanh form.
ValueId sigmoid(ProgramBuilder& builder, ValueId input);
ValueId exp(ProgramBuilder& builder, ValueId input);
ValueId gelu(ProgramBuilder& builder, ValueId input);
ValueId erf_gelu(ProgramBuilder& builder, ValueId input);
ValueId quick_gelu(ProgramBuilder& builder, ValueId input);
// parameters is a constant float32 [4].
ValueId xielu(ProgramBuilder& builder, ValueId input, ValueId parameters);
ValueId relu(ProgramBuilder& builder, ValueId input);
// The input where it exceeds the threshold, otherwise 0.
ValueId thresholded_relu(ProgramBuilder& builder, ValueId input, float threshold);
ValueId softplus(ProgramBuilder& builder, ValueId input);
ValueId tanh(ProgramBuilder& builder, ValueId input);
// clip(round_half_to_even(input / step), -levels, levels) * step, where step is a constant float32 [1] or
// [width].
ValueId round_to_grid(ProgramBuilder& builder, ValueId input, ValueId step, std::size_t levels);
// input [rows, 2 * I] holds gate | up: silu(gate) * up or gelu(gate) * up, [rows, I].
ValueId silu_mul(ProgramBuilder& builder, ValueId input);
ValueId gelu_mul(ProgramBuilder& builder, ValueId input);

// input @ weight, with activations quantised to int8 by row: see kernels/quantize and kernels/gemm. packed is
// int8 [ceil(N / 16), ceil(K / 4), 16, 4], scales and bias are float32 [N], and residual is a value [rows,
// N]. The few large values of a row are excluded and multiplied in float32: see kernels/outliers. With an
// input step (finite, above 0), the activations of all rows are instead integers q on its grid, of 8 bits or,
// in two digits, of 16 bits; the result is float(q @ weight) * (input_step * scales), without bias or
// residual. Each operation rounds once, provided that the contribution of each digit to q @ weight is within
// 2^24. With multipliers uint8 [ceil(N / 16), ceil(K / 32), 16], which require a grid, the weight is the
// product of the multipliers and 4-bit integers, packed uint8 [ceil(N / 16), ceil(K / 32), 4, 16, 4]: see
// kernels/unpack/unpack.h. The result is bit-identical to that of the same products packed as int8.
ValueId linear(ProgramBuilder& builder, ValueId input, ValueId packed, ValueId scales,
               std::optional<ValueId> bias, std::optional<ValueId> residual, std::size_t num_digits,
               std::optional<float> input_step = {}, std::optional<ValueId> multipliers = {});
// input @ weight in float32, a constant float32 [K, N]: see kernels/float_linear/float_linear.h.
ValueId float_linear(ProgramBuilder& builder, ValueId input, ValueId weight);
// input @ weight with a weight in 4-bit blocks. Activations are quantised as in linear without an input step:
// see kernels/block_gemm/block_gemm.h. The input's width K is a multiple of 32. packed is uint8 [ceil(N /
// 16), K / 32, 4, 16, 4], block_scales is float16 [ceil(N / 16), K / 32, 2, 16], and `columns` is N; bias and
// residual are as in linear.
ValueId block_linear(ProgramBuilder& builder, ValueId input, ValueId packed, ValueId block_scales,
                     std::size_t columns, std::optional<ValueId> bias, std::optional<ValueId> residual);
// The product of the weight and the part of the input that exceeds the range of a one-digit linear with
// `input_step`: see kernels/shadow/shadow.h. The operands are those of this linear and hot_channels int32
// [H], ascending, which are the rows of the weight that the program keeps in float32. Every run that finds
// outliers in the channels of other rows dequantises these rows.
ValueId shadow_linear(ProgramBuilder& builder, ValueId input, ValueId packed, ValueId scales,
                      float input_step, ValueId hot_channels);
// Adds the products of LoRA adapters to the product of an input and a weight: see kernels/low_rank. adapters
// int64 [rows] (an input) are the numbers of the rows' adapters in `tables`; 0 means no adapter, and leaves a
// row unchanged. The result takes the place of `product`, which no later operator may use.
ValueId low_rank_sum(ProgramBuilder& builder, ValueId product, ValueId input, ValueId adapters,
                     std::shared_ptr<AdapterTables> tables, const std::string& weight);
struct RouterRule {
  std::size_t top_k;
  bool norm_topk_prob = false;
  bool use_sigmoid = false;
  float norm_epsilon = 0.0f;
  std::size_t num_groups = 1;
  std::size_t top_groups = 1;
  std::size_t best_of_group = 1;
};

// The experts' activation: silu(gate) * up, with `uses_gelu` the tanh form of gelu in place of silu, or with
// a limit above 0 the clamped form of elementwise.h.
struct ExpertActivation {
  float swiglu_alpha = 1.0f;
  float swiglu_limit = 0.0f;
  bool uses_gelu = false;
};

// Constants that are added to the products, float32 [E, 2 * I] and [E, width].
struct ExpertBiases {
  std::optional<ValueId> gate_up;
  std::optional<ValueId> down;
};

// The weighted sum of the feed-forward networks (experts) that a router picks for each row. The scores of
// experts are the softmax over the row's router_logits [rows, E], or the sigmoid of each with use_sigmoid.
// The picked experts are those with the top_k largest sums of score and selection_bias float32 [E]; of equal
// ones, the first wins. The weights of the sum are the scores; with norm_topk_prob, those of the picked
// experts are divided by their sum plus norm_epsilon. With more than one group, each of which consists of
// adjacent experts, only experts of the top_groups best groups are picked; a group's rank is the sum of the
// best_of_group largest sums of score and selection_bias in it. The experts' weights are as in linear, with a
// leading axis [E]: gate_up with scales [E, 2 * I] and columns gate | up, and down with scales [E, width].
// Before each product, rows are quantised as in linear without an input step.
ValueId routed_experts(ProgramBuilder& builder, ValueId hidden, ValueId router_logits, ValueId gate_up,
                       ValueId gate_up_scales, ValueId down, ValueId down_scales,
                       std::optional<ValueId> selection_bias, const RouterRule& rule,
                       const ExpertBiases& biases = {}, const ExpertActivation& activation = {});

struct AttentionShape {
  std::size_t num_heads;
  std::size_t num_kv_heads;
  std::size_t head_dim;
  float scale;
  float soft_cap = 0.0f;      // bound of scores; 0: none
  std::size_t window = 0;     // 0: none
  bool has_raw_keys = false;  // the cache holds keys before rotary embedding
  AttentionMath math = AttentionMath::float32;
  bool appends = true;  // false: another layer has filled the caches, and qkv consists of q alone
  DualChunks dual_chunks = {};
};

// See kernels/attention/attention.h; qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], or q alone; position
// and table_row int64 [1] (inputs, or one for both), cos and sin constant float32 [context, rotary_dim / 2],
// the caches are states [num_kv_heads, P, head_dim], or with a window also ring buffers [num_kv_heads, W,
// head_dim].
// With raw keys, `qkv_bias` may be a constant [columns of qkv] that each row of qkv contains; int8 caches
// omit its part for the keys. `sinks` is a constant [num_heads].
ValueId attention(ProgramBuilder& builder, ValueId qkv, ValueId position, ValueId table_row, ValueId cos,
                  ValueId sin, ValueId key_cache, ValueId value_cache, const AttentionShape& shape,
                  std::optional<ValueId> qkv_bias = std::nullopt,
                  std::optional<ValueId> sinks = std::nullopt);

// See kernels/linear_attention/linear_attention.h; the number of rows is T. bcx [T, 3 * C] contains the input
// gate, the output gate, and x. conv_weight is a constant float32 [C, 1, taps], conv_bias is [C], and
// conv_state is a state [C, taps - 1]. The result is [T, C].
ValueId short_conv(ProgramBuilder& builder, ValueId bcx, ValueId conv_weight,
                   std::optional<ValueId> conv_bias, ValueId conv_state);

// The heads in q | k | v: q and k have num_k_heads heads of head_k_dim columns, and v has num_v_heads heads
// of head_v_dim columns.
struct DeltaRuleShape {
  std::size_t num_k_heads;
  std::size_t num_v_heads;  // a multiple of num_k_heads
  std::size_t head_k_dim;
  std::size_t head_v_dim;
  bool use_qk_l2norm;  // q and k of each head are multiplied by rsqrt(sum of their squares + 1e-6)
};

// Applies the convolution without gates to x [T, C], then SiLU. The result is [T, C].
ValueId silu_conv(ProgramBuilder& builder, ValueId x, ValueId conv_weight, std::optional<ValueId> conv_bias,
                  ValueId conv_state);

// x and step are [T, C], bc [T, 2 * state_dim], rates a constant [state_dim, C], skip a constant [C], and
// state is a state [state_dim, C]. The result is [T, C].
ValueId selective_scan(ProgramBuilder& builder, ValueId x, ValueId step, ValueId bc, ValueId rates,
                       ValueId skip, ValueId state);

// The heads in C | B | x: C and B have num_groups parts of state_dim columns, and x has num_heads heads of
// head_dim columns.
struct StateSpaceShape {
  std::size_t num_groups;
  std::size_t num_heads;  // a multiple of num_groups
  std::size_t state_dim;
  std::size_t head_dim;
};

// Applies the convolution without gates to cbx [T, C], then SiLU, and then Mamba-2's state space. gate (the
// logarithm of the decay) and step are [T, num_heads], skip is a constant [num_heads], and recurrent_state is
// a state [num_heads, state_dim, head_dim]. The result is [T, num_heads * head_dim].
ValueId mamba2(ProgramBuilder& builder, ValueId cbx, ValueId gate, ValueId step, ValueId conv_weight,
               std::optional<ValueId> conv_bias, ValueId conv_state, ValueId recurrent_state, ValueId skip,
               const StateSpaceShape& shape);

// Applies the convolution without gates to qkv [T, C], then SiLU, and then the gated delta rule with q scaled
// by head_k_dim^-1/2. gate (the logarithm of the decay) and beta are [T, num_v_heads], and recurrent_state is
// a state [num_v_heads, head_k_dim, head_v_dim]. The result is [T, num_v_heads * head_v_dim].
ValueId gated_delta_rule(ProgramBuilder& builder, ValueId qkv, ValueId gate, ValueId beta,
                         ValueId conv_weight, std::optional<ValueId> conv_bias, ValueId conv_state,
                         ValueId recurrent_state, const DeltaRuleShape& shape);

}  // namespace chunkrt
