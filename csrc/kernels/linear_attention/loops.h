// linear_attention for processors with vectors: the state space with lanes, and plain loops that compilers
// turn into the vector code of the including file's instruction set. Included by one file for each; nothing
// here is visible outside of it, and it calls no function that could be shared with another.
#pragma once

#include "kernels/lanes/exp.h"
#include "kernels/linear_attention/linear_attention.h"

namespace chunkrt {
namespace {

std::size_t smaller(std::size_t left, std::size_t right) { return left < right ? left : right; }

// One block of channels, `count` in number.
void convolve_block(const ConvolutionArgs& args, std::size_t first, std::size_t count, float* scratch) {
  const std::size_t taps = args.taps, kept = taps - 1;
  float* const window = scratch;                            // [taps, block]: z[t + j] at row (t + j) % taps
  float* const weight = scratch + taps * kChannelsPerItem;  // [taps, block]
  float* const bias = weight + taps * kChannelsPerItem;     // [block]
  for (std::size_t c = 0; c < count; ++c) {
    for (std::size_t j = 0; j < kept; ++j)
      window[j * kChannelsPerItem + c] = args.state[(first + c) * kept + j];
    for (std::size_t j = 0; j < taps; ++j) {
      weight[j * kChannelsPerItem + c] = args.weight[(first + c) * taps + j];
    }
    bias[c] = args.bias ? args.bias[first + c] : 0.0f;
  }
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::size_t at = row * args.input_stride + first;
    const float* const x = args.input + at;
    float* const newest = window + (row + kept) % taps * kChannelsPerItem;
    if (args.in_gate) {
      const float* const gate = args.in_gate + at;
      for (std::size_t c = 0; c < count; ++c) newest[c] = gate[c] * x[c];
    } else {
      for (std::size_t c = 0; c < count; ++c) newest[c] = x[c];
    }
    float sums[kChannelsPerItem];
    for (std::size_t c = 0; c < count; ++c) sums[c] = bias[c];
    for (std::size_t j = 0; j < taps; ++j) {
      const float* const z = window + (row + j) % taps * kChannelsPerItem;
      const float* const w = weight + j * kChannelsPerItem;
      for (std::size_t c = 0; c < count; ++c) sums[c] += w[c] * z[c];
    }
    float* const out = args.out + row * args.channels + first;
    if (args.out_gate) {
      const float* const gate = args.out_gate + at;
      for (std::size_t c = 0; c < count; ++c) out[c] = gate[c] * sums[c];
    } else {
      for (std::size_t c = 0; c < count; ++c) out[c] = sums[c];
    }
  }
  for (std::size_t c = 0; c < count; ++c) {
    for (std::size_t j = 0; j < kept; ++j) {
      args.state[(first + c) * kept + j] = window[(args.rows + j) % taps * kChannelsPerItem + c];
    }
  }
}

// out = scale * out + left @ right; the matrices are row-major, with adjacent rows `stride` apart.
struct Product {
  const float* left;  // [rows, depth]
  std::size_t left_stride;
  const float* right;  // [depth, columns]
  std::size_t right_stride;
  float* out;  // [rows, columns]
  std::size_t out_stride;
  std::size_t rows;
  std::size_t depth;
  std::size_t columns;
  float scale;
};

// Computes kRows x (64 / kRows) elements of a product, held in registers over the complete depth.
template <std::size_t kRows>
void multiply_tile(const Product& product, std::size_t row, std::size_t column) {
  constexpr std::size_t kColumns = 64 / kRows;
  float* const out = product.out + row * product.out_stride + column;
  float sums[kRows][kColumns];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t c = 0; c < kColumns; ++c) sums[r][c] = product.scale * out[r * product.out_stride + c];
  }
  for (std::size_t p = 0; p < product.depth; ++p) {
    const float* const right = product.right + p * product.right_stride + column;
    for (std::size_t r = 0; r < kRows; ++r) {
      const float left = product.left[(row + r) * product.left_stride + p];
      for (std::size_t c = 0; c < kColumns; ++c) sums[r][c] += left * right[c];
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t c = 0; c < kColumns; ++c) out[r * product.out_stride + c] = sums[r][c];
  }
}

template <std::size_t kRows>
void multiply_rows(const Product& product, std::size_t begin, std::size_t end) {
  std::size_t column = 0;
  for (; column + 64 / kRows <= product.columns; column += 64 / kRows) {
    for (std::size_t row = begin; row < end; row += kRows) multiply_tile<kRows>(product, row, column);
  }
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t c = column; c < product.columns; ++c) {
      float sum = product.scale * product.out[row * product.out_stride + c];
      for (std::size_t p = 0; p < product.depth; ++p) {
        sum += product.left[row * product.left_stride + p] * product.right[p * product.right_stride + c];
      }
      product.out[row * product.out_stride + c] = sum;
    }
  }
}

void multiply(const Product& product) {
  const std::size_t fours = product.rows / 4 * 4, pairs = product.rows / 2 * 2;
  multiply_rows<4>(product, 0, fours);
  multiply_rows<2>(product, fours, pairs);
  multiply_rows<1>(product, pairs, product.rows);
}

// Computes the rows [first, first + count) of one v head, where count <= kDeltaRows.
void advance_head(const DeltaRuleArgs& args, std::size_t head, std::size_t first, std::size_t count,
                  float* scratch) {
  const std::size_t k_dim = args.k_dim, v_dim = args.v_dim;
  const std::size_t all_keys = args.num_k_heads * k_dim, all_values = args.num_v_heads * v_dim;
  const std::size_t k_head = head / (args.num_v_heads / args.num_k_heads);
  const float* const row_0 = args.qkv + first * (2 * all_keys + all_values);
  float* const state = args.state + head * k_dim * v_dim;

  float* const keys = scratch;                          // [2 * count, k_dim]: keys, then queries
  float* const keys_across = keys + 2 * count * k_dim;  // [k_dim, count]
  float* const scores = keys_across + k_dim * count;    // [2 * count, count]: of keys, of queries
  float* const values = scores + 2 * count * count;     // [2 * count, v_dim]: K S, then D; Q S, then o
  for (std::size_t i = 0; i < count; ++i) {
    const float* const q = row_0 + i * (2 * all_keys + all_values) + k_head * k_dim;
    const float* const k = q + all_keys;
    for (std::size_t d = 0; d < k_dim; ++d) {
      keys[i * k_dim + d] = k[d];
      keys[(count + i) * k_dim + d] = args.scale * q[d];
      keys_across[d * count + i] = k[d];
    }
  }
  for (std::size_t i = 0; i < 2 * count * (count + v_dim); ++i) scores[i] = 0.0f;  // values too
  multiply({.left = keys,
            .left_stride = k_dim,
            .right = state,
            .right_stride = v_dim,
            .out = values,
            .out_stride = v_dim,
            .rows = 2 * count,
            .depth = k_dim,
            .columns = v_dim,
            .scale = 1.0f});
  multiply({.left = keys,
            .left_stride = k_dim,
            .right = keys_across,
            .right_stride = count,
            .out = scores,
            .out_stride = count,
            .rows = 2 * count,
            .depth = k_dim,
            .columns = count,
            .scale = 1.0f});

  float since[kDeltaRows];   // G[i, j] of the row i
  float since_start = 1.0f;  // P[i]
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t gate = (first + i) * args.num_v_heads + head;
    const float decay = args.decay[gate], beta = args.beta[gate];
    for (std::size_t j = 0; j < i; ++j) since[j] *= decay;
    since[i] = 1.0f;
    since_start *= decay;
    float* const key_scores = scores + i * count;
    float* const query_scores = scores + (count + i) * count;
    for (std::size_t j = 0; j < i; ++j) key_scores[j] *= -(beta * since[j]);
    for (std::size_t j = 0; j <= i; ++j) query_scores[j] *= since[j];

    const float* const v = row_0 + i * (2 * all_keys + all_values) + 2 * all_keys + head * v_dim;
    float* const delta = values + i * v_dim;
    for (std::size_t d = 0; d < v_dim; ++d) delta[d] = beta * (v[d] - since_start * delta[d]);
    Product sum = {.left = key_scores,
                   .left_stride = count,
                   .right = values,
                   .right_stride = v_dim,
                   .out = delta,
                   .out_stride = v_dim,
                   .rows = 1,
                   .depth = i,
                   .columns = v_dim,
                   .scale = 1.0f};
    multiply(sum);
    sum.left = query_scores;
    sum.out = values + (count + i) * v_dim;
    sum.depth = i + 1;
    sum.scale = since_start;
    multiply(sum);
    float* const out = args.out + (first + i) * all_values + head * v_dim;
    for (std::size_t d = 0; d < v_dim; ++d) out[d] = sum.out[d];
  }
  for (std::size_t d = 0; d < k_dim; ++d) {
    for (std::size_t j = 0; j < count; ++j) keys_across[d * count + j] *= since[j];
  }
  multiply({.left = keys_across,
            .left_stride = count,
            .right = values,
            .right_stride = v_dim,
            .out = state,
            .out_stride = v_dim,
            .rows = k_dim,
            .depth = count,
            .columns = v_dim,
            .scale = since_start});
}

// Advances kRows rows, from `first` on, of the columns [column, column + count) of one head, where count
// <= 16.
template <std::size_t kRows>
CHUNKRT_LANES void advance_columns(const StateSpaceArgs& args, std::size_t head, std::size_t first,
                                   std::size_t column, std::size_t count) {
  const std::size_t keys = args.num_groups * args.state_dim, values = args.num_heads * args.head_dim;
  const std::size_t width = 2 * keys + values;
  const std::size_t group = head / (args.num_heads / args.num_groups);
  const float* const c = args.cbx + first * width + group * args.state_dim;
  const float* const b = c + keys;
  const float* const x = args.cbx + first * width + 2 * keys + head * args.head_dim + column;
  float* state = args.state + head * args.state_dim * args.head_dim + column;
  Floats stepped[kRows], sums[kRows], decay[kRows];
  for (std::size_t r = 0; r < kRows; ++r) {
    const std::size_t gate = (first + r) * args.num_heads + head;
    stepped[r] = all(args.step[gate]) * load(x + r * width, count);
    decay[r] = all(args.decay[gate]);
    sums[r] = all(0.0f);
  }
  for (std::size_t i = 0; i < args.state_dim; ++i, state += args.head_dim) {
    Floats s = load(state, count);
    for (std::size_t r = 0; r < kRows; ++r) {
      s = multiply_add(all(b[r * width + i]), stepped[r], decay[r] * s);
      sums[r] = multiply_add(all(c[r * width + i]), s, sums[r]);
    }
    store(state, s, count);
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    float* const out = args.out + (first + r) * values + head * args.head_dim + column;
    store(out, multiply_add(all(args.skip[head]), load(x + r * width, count), sums[r]), count);
  }
}

}  // namespace

void CHUNKRT_NAME(causal_convolution_f32_f32)(const ConvolutionArgs& args, std::size_t begin, std::size_t end,
                                              float* scratch) {
  for (std::size_t item = begin; item < end; ++item) {
    const std::size_t first = item * kChannelsPerItem;
    convolve_block(args, first, smaller(kChannelsPerItem, args.channels - first), scratch);
  }
}

void CHUNKRT_NAME(gated_delta_rule_f32_f32)(const DeltaRuleArgs& args, std::size_t begin, std::size_t end,
                                            float* scratch) {
  for (std::size_t head = begin; head < end; ++head) {
    for (std::size_t first = 0; first < args.rows; first += kDeltaRows) {
      advance_head(args, head, first, smaller(kDeltaRows, args.rows - first), scratch);
    }
  }
}

void CHUNKRT_NAME(state_space_f32_f32)(const StateSpaceArgs& args, std::size_t begin, std::size_t end) {
  constexpr std::size_t kRows = 4;
  for (std::size_t head = begin; head < end; ++head) {
    for (std::size_t column = 0; column < args.head_dim; column += kLanes) {
      const std::size_t count = smaller(kLanes, args.head_dim - column);
      std::size_t row = 0;
      for (; row + kRows <= args.rows; row += kRows) advance_columns<kRows>(args, head, row, column, count);
      for (; row < args.rows; ++row) advance_columns<1>(args, head, row, column, count);
    }
  }
}

void CHUNKRT_NAME(selective_scan_f32_f32)(const SelectiveScanArgs& args, std::size_t begin, std::size_t end) {
  const std::size_t channels = args.channels, last = smaller(end * kChannelsPerItem, channels);
  for (std::size_t first = begin * kChannelsPerItem; first < last; first += kLanes) {
    const std::size_t count = last - first;
    for (std::size_t row = 0; row < args.rows; ++row) {
      const float* const b = args.bc + row * 2 * args.state_dim;
      const float* const c = b + args.state_dim;
      const Floats x = load(args.x + row * channels + first, count);
      const Floats step = load(args.step + row * channels + first, count), written = step * x;
      Floats y = all(0.0f);
      for (std::size_t n = 0; n < args.state_dim; ++n) {
        float* const state = args.state + n * channels + first;
        const Floats angle = step * load(args.rates + n * channels + first, count);
        const Floats decay = zero_if_less(angle, all(-kExpLimit), exponential(angle));
        const Floats s = multiply_add(all(b[n]), written, decay * load(state, count));
        store(state, s, count);
        y = multiply_add(all(c[n]), s, y);
      }
      store(args.out + row * channels + first, multiply_add(load(args.skip + first, count), x, y), count);
    }
  }
}

}  // namespace chunkrt
