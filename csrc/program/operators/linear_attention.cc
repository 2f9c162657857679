// The operators of layers whose state does not grow with the position: see kernels/linear_attention.
#include <cmath>
#include <initializer_list>
#include <utility>

#include "kernels/dispatch.h"
#include "program/operators/operators.h"

namespace chunkrt {
namespace {

constexpr float kL2Epsilon = 1e-6f;

// `columns_per_channel`: 1 for x alone, 3 for in_gate | out_gate | x.
ValueId convolution(ProgramBuilder& builder, ValueId input, std::size_t columns_per_channel, ValueId weight,
                    std::optional<ValueId> bias, ValueId conv_state) {
  const Shape& taps_shape = builder.value(weight).shape;
  require(builder.rows_of(input, "convolution's input") == Symbol::T,
          "convolution: expected rows T, got " + describe(Dtype::float32, builder.value(input).shape));
  const std::size_t width = builder.width_of(input), channels = width / columns_per_channel;
  require(width % columns_per_channel == 0, "convolution: expected " + std::to_string(columns_per_channel) +
                                                " equal parts, got a width of " + std::to_string(width));
  require(taps_shape.size() == 3 && taps_shape[2].size >= 2,
          "convolution: expected a weight [channels, 1, taps] of 2 taps or more, got " +
              describe(builder.value(weight).dtype, taps_shape));
  const std::size_t taps = taps_shape[2].size;
  builder.require_constant(weight, Dtype::float32, {fixed(channels), fixed(1), fixed(taps)},
                           "convolution's weight");
  if (bias) builder.require_constant(*bias, Dtype::float32, {fixed(channels)}, "convolution's bias");
  builder.require_state(conv_state, {fixed(channels), fixed(taps - 1)}, "convolution's state");

  const ValueId out = builder.float_rows(Symbol::T, channels);
  builder.need_scratch(convolution_scratch_floats(taps));
  ConvolutionFunction* kernel = select_kernel(causal_convolution_f32_f32).function;
  std::vector<ValueId> uses = {input, weight, conv_state, out};
  if (bias) uses.push_back(*bias);
  builder.add_loop([=](const Frame&) { return convolution_items(channels); }, 1, "causal_convolution", uses,
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                     const float* columns = frame.get<const float>(input);
                     const bool is_gated = columns_per_channel == 3;
                     kernel({.input = is_gated ? columns + 2 * channels : columns,
                             .in_gate = is_gated ? columns : nullptr,
                             .out_gate = is_gated ? columns + channels : nullptr,
                             .weight = frame.get<const float>(weight),
                             .bias = bias ? frame.get<const float>(*bias) : nullptr,
                             .state = frame.get<float>(conv_state),
                             .out = frame.get<float>(out),
                             .rows = frame.size_of(Symbol::T),
                             .channels = channels,
                             .taps = taps,
                             .input_stride = width},
                            begin, end, scratch);
                   });
  return out;
}

// x * rsqrt(sum x^2 + e) is x * rsqrt(mean x^2 + e / k_dim) * k_dim^-1/2.
ValueId l2_normalised(ProgramBuilder& builder, ValueId qkv, std::size_t num_k_heads, std::size_t k_dim) {
  const auto dim = static_cast<float>(k_dim);
  const auto weight =
      std::make_shared<const std::vector<float>>(2 * num_k_heads * k_dim, 1.0f / std::sqrt(dim));
  return head_norm(builder, qkv,
                   builder.constant(weight->data(), Dtype::float32, {2 * num_k_heads, k_dim}, weight),
                   kL2Epsilon / dim);
}

// `expected` begins the message.
void require_gates(const ProgramBuilder& builder, const std::string& expected,
                   std::initializer_list<ValueId> gates, std::size_t num_heads) {
  const Shape of_heads = {rows_dimension(Symbol::T), fixed(num_heads)};
  for (const ValueId id : gates) {
    require(builder.value(id).dtype == Dtype::float32 && builder.value(id).shape == of_heads,
            expected + describe(Dtype::float32, of_heads) + ", got " +
                describe(builder.value(id).dtype, builder.value(id).shape));
  }
}

}  // namespace

ValueId short_conv(ProgramBuilder& builder, ValueId bcx, ValueId conv_weight,
                   std::optional<ValueId> conv_bias, ValueId conv_state) {
  return convolution(builder, bcx, 3, conv_weight, conv_bias, conv_state);
}

ValueId silu_conv(ProgramBuilder& builder, ValueId x, ValueId conv_weight, std::optional<ValueId> conv_bias,
                  ValueId conv_state) {
  const ValueId convolved = convolution(builder, x, 1, conv_weight, conv_bias, conv_state);
  return mul(builder, convolved, sigmoid(builder, convolved));
}

ValueId selective_scan(ProgramBuilder& builder, ValueId x, ValueId step, ValueId bc, ValueId rates,
                       ValueId skip, ValueId state) {
  const Shape& of_rates = builder.value(rates).shape;
  require(builder.rows_of(x, "selective_scan's x") == Symbol::T &&
              builder.rows_of(step, "selective_scan's step") == Symbol::T &&
              builder.rows_of(bc, "selective_scan's bc") == Symbol::T,
          "selective_scan: expected rows T, got " + describe(Dtype::float32, builder.value(x).shape));
  const std::size_t channels = builder.width_of(x);
  require(builder.width_of(step) == channels, "selective_scan: expected a step for each of " +
                                                  std::to_string(channels) + " channels, got " +
                                                  describe(Dtype::float32, builder.value(step).shape));
  require(of_rates.size() == 2 && of_rates[0].size >= 1 && builder.width_of(bc) == 2 * of_rates[0].size,
          "selective_scan: expected rates [state_dim, channels] and bc [T, 2 * state_dim], got " +
              describe(builder.value(rates).dtype, of_rates) + " and " +
              describe(Dtype::float32, builder.value(bc).shape));
  const std::size_t state_dim = of_rates[0].size;
  builder.require_constant(rates, Dtype::float32, {fixed(state_dim), fixed(channels)},
                           "selective_scan's rates");
  builder.require_constant(skip, Dtype::float32, {fixed(channels)}, "selective_scan's skip");
  builder.require_state(state, {fixed(state_dim), fixed(channels)}, "selective_scan's state");
  const ValueId out = builder.float_rows(Symbol::T, channels);
  SelectiveScanFunction* kernel = select_kernel(selective_scan_f32_f32).function;
  builder.add_loop([=](const Frame&) { return convolution_items(channels); }, 1, "selective_scan",
                   {x, step, bc, rates, skip, state, out},
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                     kernel({.x = frame.get<const float>(x),
                             .step = frame.get<const float>(step),
                             .bc = frame.get<const float>(bc),
                             .rates = frame.get<const float>(rates),
                             .skip = frame.get<const float>(skip),
                             .state = frame.get<float>(state),
                             .out = frame.get<float>(out),
                             .rows = frame.size_of(Symbol::T),
                             .channels = channels,
                             .state_dim = state_dim},
                            begin, end);
                   });
  return out;
}

ValueId gated_delta_rule(ProgramBuilder& builder, ValueId qkv, ValueId gate, ValueId beta,
                         ValueId conv_weight, std::optional<ValueId> conv_bias, ValueId conv_state,
                         ValueId recurrent_state, const DeltaRuleShape& shape) {
  const std::size_t num_k_heads = shape.num_k_heads, num_v_heads = shape.num_v_heads;
  const std::size_t k_dim = shape.head_k_dim, v_dim = shape.head_v_dim;
  require(num_k_heads > 0 && num_v_heads > 0 && num_v_heads % num_k_heads == 0,
          "gated_delta_rule: expected the number of v heads to be a multiple of that of k heads, got " +
              std::to_string(num_v_heads) + " and " + std::to_string(num_k_heads));
  const std::size_t most =
      builder.rows_of(qkv, "gated_delta_rule's qkv") == Symbol::T ? builder.width_of(qkv) : 0;
  require(k_dim > 0 && v_dim > 0 && num_v_heads <= most && k_dim <= most / num_k_heads &&
              v_dim <= most / num_v_heads && 2 * num_k_heads * k_dim + num_v_heads * v_dim == most,
          "gated_delta_rule: expected qkv [T, columns] with q and k of " + std::to_string(num_k_heads) +
              " heads of " + std::to_string(k_dim) + " and v of " + std::to_string(num_v_heads) +
              " heads of " + std::to_string(v_dim) + ", got " +
              describe(Dtype::float32, builder.value(qkv).shape));
  require_gates(builder, "gated_delta_rule: expected gate and beta ", {gate, beta}, num_v_heads);
  builder.require_state(recurrent_state, {fixed(num_v_heads), fixed(k_dim), fixed(v_dim)},
                        "gated_delta_rule's recurrent state");

  const ValueId convolved = convolution(builder, qkv, 1, conv_weight, conv_bias, conv_state);
  ValueId activated = mul(builder, convolved, sigmoid(builder, convolved));
  const float inverse_root = 1.0f / std::sqrt(static_cast<float>(k_dim));
  if (shape.use_qk_l2norm) activated = l2_normalised(builder, activated, num_k_heads, k_dim);
  const ValueId decay = exp(builder, gate);

  const ValueId out = builder.float_rows(Symbol::T, num_v_heads * v_dim);
  builder.need_scratch(delta_rule_scratch_floats(k_dim, v_dim));
  DeltaRuleFunction* kernel = select_kernel(gated_delta_rule_f32_f32).function;
  builder.add_loop([=](const Frame&) { return num_v_heads; }, 1, "gated_delta_rule",
                   {activated, decay, beta, recurrent_state, out},
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                     kernel({.qkv = frame.get<const float>(activated),
                             .decay = frame.get<const float>(decay),
                             .beta = frame.get<const float>(beta),
                             .state = frame.get<float>(recurrent_state),
                             .out = frame.get<float>(out),
                             .rows = frame.size_of(Symbol::T),
                             .num_k_heads = num_k_heads,
                             .num_v_heads = num_v_heads,
                             .k_dim = k_dim,
                             .v_dim = v_dim,
                             .scale = inverse_root},
                            begin, end, scratch);
                   });
  return out;
}

ValueId mamba2(ProgramBuilder& builder, ValueId cbx, ValueId gate, ValueId step, ValueId conv_weight,
               std::optional<ValueId> conv_bias, ValueId conv_state, ValueId recurrent_state, ValueId skip,
               const StateSpaceShape& shape) {
  const auto [num_groups, num_heads, state_dim, head_dim] = shape;
  require(num_groups > 0 && num_heads > 0 && num_heads % num_groups == 0,
          "mamba2: expected the number of heads to be a multiple of that of groups, got " +
              std::to_string(num_heads) + " and " + std::to_string(num_groups));
  const std::size_t most = builder.rows_of(cbx, "mamba2's cbx") == Symbol::T ? builder.width_of(cbx) : 0;
  require(state_dim > 0 && head_dim > 0 && num_heads <= most && state_dim <= most / num_groups &&
              head_dim <= most / num_heads && 2 * num_groups * state_dim + num_heads * head_dim == most,
          "mamba2: expected cbx [T, columns] with C and B of " + std::to_string(num_groups) + " groups of " +
              std::to_string(state_dim) + " and x of " + std::to_string(num_heads) + " heads of " +
              std::to_string(head_dim) + ", got " + describe(Dtype::float32, builder.value(cbx).shape));
  require_gates(builder, "mamba2: expected gate and step ", {gate, step}, num_heads);
  builder.require_state(recurrent_state, {fixed(num_heads), fixed(state_dim), fixed(head_dim)},
                        "mamba2's recurrent state");
  builder.require_constant(skip, Dtype::float32, {fixed(num_heads)}, "mamba2's skip");

  const ValueId convolved = convolution(builder, cbx, 1, conv_weight, conv_bias, conv_state);
  const ValueId activated = mul(builder, convolved, sigmoid(builder, convolved));
  const ValueId decay = exp(builder, gate), out = builder.float_rows(Symbol::T, num_heads * head_dim);
  StateSpaceFunction* kernel = select_kernel(state_space_f32_f32).function;
  builder.add_loop([=](const Frame&) { return shape.num_heads; }, 1, "state_space",
                   {activated, decay, step, skip, recurrent_state, out},
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                     kernel({.cbx = frame.get<const float>(activated),
                             .decay = frame.get<const float>(decay),
                             .step = frame.get<const float>(step),
                             .skip = frame.get<const float>(skip),
                             .state = frame.get<float>(recurrent_state),
                             .out = frame.get<float>(out),
                             .rows = frame.size_of(Symbol::T),
                             .num_groups = shape.num_groups,
                             .num_heads = shape.num_heads,
                             .state_dim = shape.state_dim,
                             .head_dim = shape.head_dim},
                            begin, end);
                   });
  return out;
}

}  // namespace chunkrt
