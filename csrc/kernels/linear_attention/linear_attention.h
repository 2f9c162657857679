// linear_attention: the causal depthwise convolution, the gated delta rule and Mamba-2's state space, the
// layers whose state does not grow with the position.
//
// Convolution (LFM2's short convolution; the first step of the delta rule's layers), for each channel c, with
// K taps and z = [the K - 1 columns of the state | s], s[t] = in_gate[t] * x[t], or x[t] without gates:
//   y[t] = the chain y + w[j] * z[t + j] over j ascending from the bias, or from 0
//   out[t] = out_gate[t] * y[t], or y[t]
// Afterwards the state holds the last K - 1 columns of z.
//
// Gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"), for each v head, S [dk, dv]:
//   S <- a S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T (scale q),   a = decay[t], beta = beta[t]
// v head h uses k head floor(h / (num_v_heads / num_k_heads)). The reference computes this row by row. The
// other implementations compute up to kDeltaRows rows at once (the chunk form of the same paper, where K, Q
// and V are the matrices of these rows):
//   G[i, j] = the product of decay[j + 1 .. i],  P[i] = the product of decay[0 .. i]
//   D[i] = beta[i] (v[i] - P[i] (K S)[i]) - sum over j < i of beta[i] G[i, j] (k[i] . k[j]) D[j]
//   o[i] = P[i] (scale Q S)[i] + sum over j <= i of G[i, j] (scale q[i] . k[j]) D[j]
//   S <- P[n - 1] S + sum over j of (G[n - 1, j] k[j]) D[j]^T,   n rows
// For one row this is the single step, which reads S twice and writes it once.
//
// State space (Dao and Gu 2024, "Transformers are SSMs"), for each head, S [state_dim, head_dim], row by row:
//   S <- a S + B (step x)^T;  y = S^T C + skip x,   a = decay[t], step = step[t]
// Head h uses B and C of group floor(h / (num_heads / num_groups)). In float32 arithmetic, u = step * x, s =
// fma(B[i], u, a * s), and y is the chain fma(C[i], s, y) over i ascending from 0, then fma(skip, x, y). The
// results are bit-identical on all instruction sets and for all splits into calls.
//
// Selective scan (Gu and Dao 2023, "Mamba"), for each channel, s [state_dim], row by row:
//   s[n] <- exp(step a[n]) s[n] + b[n] step x;  y = sum over n of c[n] s[n] + skip x,   step = step[t]
// In float32 arithmetic, s = fma(b[n], step * x, decay * s), where decay is the exp kernel of step * a[n],
// and y is the chain fma(c[n], s, y) over n ascending from 0, then fma(skip, x, y). The results are
// bit-identical on all instruction sets and for all splits into calls.
//
// Numerics of the others: all arithmetic is in float32. Products and sums are rounded separately, and every
// sum is one chain in the order of its index. The decays themselves are multiplied, instead of taking
// exponentials of differences, so that a decay after a far stronger one keeps all its digits. The convolution
// gives bit-identical results on all instruction sets and for all splits into calls. The delta rule gives
// bit-identical results on all instruction sets except the reference, for any split of heads; if the rows are
// split differently into calls, the results differ by rounding. A NaN or an infinity in a row affects that
// row's outputs and, through the states, later rows, but never earlier ones.
#pragma once

#include <cstddef>

namespace chunkrt {

struct ConvolutionArgs {
  const float* input;     // float32 [rows, channels], rows input_stride apart: x
  const float* in_gate;   // as input, or nullptr
  const float* out_gate;  // as input, or nullptr
  const float* weight;    // float32 [channels, taps]
  const float* bias;      // float32 [channels], or nullptr
  float* state;           // float32 [channels, taps - 1], the oldest first
  float* out;             // float32 [rows, channels]; may not overlap the input or the gates
  std::size_t rows;
  std::size_t channels;
  std::size_t taps;  // at least 2
  std::size_t input_stride;
};

struct DeltaRuleArgs {
  const float* qkv;    // float32 [rows, 2 * num_k_heads * k_dim + num_v_heads * v_dim]: q | k | v along a row
  const float* decay;  // float32 [rows, num_v_heads]
  const float* beta;   // as decay
  float* state;        // float32 [num_v_heads, k_dim, v_dim]
  float* out;          // float32 [rows, num_v_heads * v_dim]; may not overlap the inputs
  std::size_t rows;
  std::size_t num_k_heads;
  std::size_t num_v_heads;  // a multiple of num_k_heads
  std::size_t k_dim;
  std::size_t v_dim;  // any; a multiple of 64 is fastest
  float scale;        // for q
};

struct StateSpaceArgs {
  const float*
      cbx;  // float32 [rows, 2 * num_groups * state_dim + num_heads * head_dim]: C | B | x along a row
  const float* decay;  // float32 [rows, num_heads]
  const float* step;   // as decay
  const float* skip;   // float32 [num_heads]
  float* state;        // float32 [num_heads, state_dim, head_dim]
  float* out;          // float32 [rows, num_heads * head_dim]; may not overlap the inputs
  std::size_t rows;
  std::size_t num_groups;
  std::size_t num_heads;  // a multiple of num_groups
  std::size_t state_dim;
  std::size_t head_dim;  // any; a multiple of 16 is fastest
};

struct SelectiveScanArgs {
  const float* x;      // float32 [rows, channels]
  const float* step;   // as x
  const float* bc;     // float32 [rows, 2 * state_dim]: b | c along a row
  const float* rates;  // float32 [state_dim, channels]: a, at most 0
  const float* skip;   // float32 [channels]
  float* state;        // float32 [state_dim, channels]
  float* out;          // float32 [rows, channels]; may not overlap the inputs
  std::size_t rows;
  std::size_t channels;
  std::size_t state_dim;
};

inline constexpr std::size_t kChannelsPerItem = 64;
inline constexpr std::size_t kDeltaRows = 32;  // Maximum number of rows that the chunk form computes at once.

// Number of items of a convolution or a selective scan. The items of the delta rule are the v heads, those of
// the state space the heads.
std::size_t convolution_items(std::size_t channels);

// Number of floats of scratch for one call. Concurrent calls need separate scratch. A call allocates no
// memory.
std::size_t convolution_scratch_floats(std::size_t taps);
std::size_t delta_rule_scratch_floats(std::size_t k_dim, std::size_t v_dim);

// Runs items [begin, end).
using ConvolutionFunction = void(const ConvolutionArgs& args, std::size_t begin, std::size_t end,
                                 float* scratch);
using DeltaRuleFunction = void(const DeltaRuleArgs& args, std::size_t begin, std::size_t end, float* scratch);
// Needs no scratch.
using StateSpaceFunction = void(const StateSpaceArgs& args, std::size_t begin, std::size_t end);
using SelectiveScanFunction = void(const SelectiveScanArgs& args, std::size_t begin, std::size_t end);

}  // namespace chunkrt
