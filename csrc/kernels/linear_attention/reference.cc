// linear_attention, portable and one row at a time: the reference implementation.
#include <algorithm>
#include <cmath>

#include "kernels/list.h"

namespace chunkrt {

std::size_t convolution_items(std::size_t channels) {
  return (channels + kChannelsPerItem - 1) / kChannelsPerItem;
}

std::size_t convolution_scratch_floats(std::size_t taps) { return (2 * taps + 1) * kChannelsPerItem; }

std::size_t delta_rule_scratch_floats(std::size_t k_dim, std::size_t v_dim) {
  return kDeltaRows * (3 * k_dim + 2 * kDeltaRows + 2 * v_dim);
}

void causal_convolution_f32_f32_reference(const ConvolutionArgs& args, std::size_t begin, std::size_t end,
                                          float* scratch) {
  const std::size_t last = std::min(end * kChannelsPerItem, args.channels), kept = args.taps - 1;
  float* const window = scratch;  // [taps] of z
  for (std::size_t channel = begin * kChannelsPerItem; channel < last; ++channel) {
    float* state = args.state + channel * kept;
    std::copy_n(state, kept, window);
    for (std::size_t row = 0; row < args.rows; ++row) {
      const std::size_t at = row * args.input_stride + channel;
      window[kept] = args.in_gate ? args.in_gate[at] * args.input[at] : args.input[at];
      float sum = args.bias ? args.bias[channel] : 0.0f;
      for (std::size_t j = 0; j < args.taps; ++j) sum += args.weight[channel * args.taps + j] * window[j];
      args.out[row * args.channels + channel] = args.out_gate ? args.out_gate[at] * sum : sum;
      std::copy_n(window + 1, kept, window);
    }
    std::copy_n(window, kept, state);
  }
}

void gated_delta_rule_f32_f32_reference(const DeltaRuleArgs& args, std::size_t begin, std::size_t end,
                                        float* scratch) {
  const std::size_t k_dim = args.k_dim, v_dim = args.v_dim, all_keys = args.num_k_heads * k_dim;
  float* const delta = scratch;  // [v_dim]
  for (std::size_t head = begin; head < end; ++head) {
    const std::size_t k_head = head / (args.num_v_heads / args.num_k_heads);
    float* const state = args.state + head * k_dim * v_dim;
    for (std::size_t row = 0; row < args.rows; ++row) {
      const float* q = args.qkv + row * (2 * all_keys + args.num_v_heads * v_dim) + k_head * k_dim;
      const float* k = q + all_keys;
      const float* v = q - k_head * k_dim + 2 * all_keys + head * v_dim;
      const float decay = args.decay[row * args.num_v_heads + head];
      const float beta = args.beta[row * args.num_v_heads + head];
      float* out = args.out + (row * args.num_v_heads + head) * v_dim;
      for (std::size_t i = 0; i < k_dim * v_dim; ++i) state[i] *= decay;
      for (std::size_t j = 0; j < v_dim; ++j) {
        float recalled = 0.0f;
        for (std::size_t i = 0; i < k_dim; ++i) recalled += state[i * v_dim + j] * k[i];
        delta[j] = beta * (v[j] - recalled);
      }
      std::fill_n(out, v_dim, 0.0f);
      for (std::size_t i = 0; i < k_dim; ++i) {
        for (std::size_t j = 0; j < v_dim; ++j) {
          state[i * v_dim + j] += k[i] * delta[j];
          out[j] += state[i * v_dim + j] * (args.scale * q[i]);
        }
      }
    }
  }
}

void state_space_f32_f32_reference(const StateSpaceArgs& args, std::size_t begin, std::size_t end) {
  const std::size_t state_dim = args.state_dim, head_dim = args.head_dim;
  const std::size_t keys = args.num_groups * state_dim, values = args.num_heads * head_dim;
  for (std::size_t head = begin; head < end; ++head) {
    const std::size_t group = head / (args.num_heads / args.num_groups);
    float* const state = args.state + head * state_dim * head_dim;
    for (std::size_t row = 0; row < args.rows; ++row) {
      const float* const c = args.cbx + row * (2 * keys + values) + group * state_dim;
      const float* const b = c + keys;
      const float* const x = args.cbx + row * (2 * keys + values) + 2 * keys + head * head_dim;
      const float decay = args.decay[row * args.num_heads + head];
      const float step = args.step[row * args.num_heads + head];
      float* const out = args.out + row * values + head * head_dim;
      for (std::size_t j = 0; j < head_dim; ++j) {
        float sum = 0.0f;
        for (std::size_t i = 0; i < state_dim; ++i) {
          float& s = state[i * head_dim + j];
          s = std::fma(b[i], step * x[j], decay * s);
          sum = std::fma(c[i], s, sum);
        }
        out[j] = std::fma(args.skip[head], x[j], sum);
      }
    }
  }
}

void selective_scan_f32_f32_reference(const SelectiveScanArgs& args, std::size_t begin, std::size_t end) {
  const std::size_t channels = args.channels, last = std::min(end * kChannelsPerItem, channels);
  for (std::size_t row = 0; row < args.rows; ++row) {
    const float* const b = args.bc + row * 2 * args.state_dim;
    const float* const c = b + args.state_dim;
    for (std::size_t channel = begin * kChannelsPerItem; channel < last; ++channel) {
      const float x = args.x[row * channels + channel], step = args.step[row * channels + channel];
      float sum = 0.0f;
      for (std::size_t n = 0; n < args.state_dim; ++n) {
        float& s = args.state[n * channels + channel];
        float decay = step * args.rates[n * channels + channel];
        exp_f32_f32_reference(&decay, &decay, 1);
        s = std::fma(b[n], step * x, decay * s);
        sum = std::fma(c[n], s, sum);
      }
      args.out[row * channels + channel] = std::fma(args.skip[channel], x, sum);
    }
  }
}

}  // namespace chunkrt
