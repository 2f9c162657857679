// attention with NEON: a tile of 4 queries by 16 keys, then by 16 columns, keeps its sums in 16 of the 32
// registers.
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "kernels/attention/blocked.h"
#include "kernels/attention/round_bfloat.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 4;
constexpr std::size_t kVectors = 4;  // sixteen keys, or columns
constexpr std::size_t kQueriesPerTile = 4;

void rope(const float* input, const float* cos, const float* sin, std::size_t head_dim,
          std::size_t rotary_dim, float scale, float* out) {
  const std::size_t half = rotary_dim / 2;
  std::size_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const float32x4_t first = vld1q_f32(input + i), second = vld1q_f32(input + i + half);
    const float32x4_t c = vld1q_f32(cos + i), s = vld1q_f32(sin + i);
    const float32x4_t roped_first = vfmaq_f32(vnegq_f32(vmulq_f32(second, s)), first, c);
    const float32x4_t roped_second = vfmaq_f32(vmulq_f32(first, s), second, c);
    vst1q_f32(out + i, vmulq_n_f32(roped_first, scale));
    vst1q_f32(out + i + half, vmulq_n_f32(roped_second, scale));
  }
  for (; i < half; ++i) {
    const float first = input[i], second = input[i + half];
    const float second_sin = second * sin[i], first_sin = first * sin[i];
    out[i] = fmaf(first, cos[i], -second_sin) * scale;
    out[i + half] = fmaf(second, cos[i], first_sin) * scale;
  }
  for (i = rotary_dim; i < head_dim; ++i) out[i] = input[i] * scale;
}

void narrow(const float* input, std::uint16_t* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(input + i))));
  }
  for (; i < count; ++i) {
    out[i] = vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(input[i]))), 0);
  }
}

void dequantize(const std::byte* row, std::size_t head_dim, const float* bias, float* out) {
  const auto* const values = reinterpret_cast<const std::int8_t*>(row);
  for (std::size_t i = 0, end; i < head_dim; i = end) {
    float scale;
    memcpy(&scale, row + head_dim + i / kInt8Group * sizeof(scale), sizeof(scale));
    end = head_dim - i < kInt8Group ? head_dim : i + kInt8Group;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      const int16x8_t integers = vmovl_s8(vld1_s8(values + i));
      const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(integers)));
      const float32x4_t high = vcvtq_f32_s32(vmovl_s16(vget_high_s16(integers)));
      const float32x4_t none = vdupq_n_f32(0.0f);
      const float32x4_t added_low = bias == nullptr ? none : vld1q_f32(bias + i);
      const float32x4_t added_high = bias == nullptr ? none : vld1q_f32(bias + i + kLanes);
      vst1q_f32(out + i, vfmaq_n_f32(added_low, low, scale));
      vst1q_f32(out + i + kLanes, vfmaq_n_f32(added_high, high, scale));
    }
    for (; i < end; ++i) {
      out[i] = fmaf(static_cast<float>(values[i]), scale, bias == nullptr ? 0.0f : bias[i]);
    }
  }
}

void transpose_4_by_4(const float* const* rows, std::size_t column, float* out) {
  const float32x4_t a = vld1q_f32(rows[0] + column), b = vld1q_f32(rows[1] + column);
  const float32x4_t c = vld1q_f32(rows[2] + column), d = vld1q_f32(rows[3] + column);
  const float64x2_t ab_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
  const float64x2_t ab_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  const float64x2_t cd_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
  const float64x2_t cd_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
  vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(ab_even, cd_even)));
  vst1q_f32(out + kKeysPerBlock, vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd)));
  vst1q_f32(out + 2 * kKeysPerBlock, vreinterpretq_f32_f64(vtrn2q_f64(ab_even, cd_even)));
  vst1q_f32(out + 3 * kKeysPerBlock, vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd)));
}

// Fills num_keys columns, rounded up to a multiple of 16; the columns past num_keys are copies of the last
// key.
void transpose(const float* keys, std::size_t num_keys, std::size_t head_dim, float* out) {
  for (std::size_t key = 0; key < num_keys || key % 16 != 0; key += kLanes) {
    const float* rows[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) {
      rows[i] = keys + (key + i < num_keys ? key + i : num_keys - 1) * head_dim;
    }
    std::size_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) transpose_4_by_4(rows, d, out + d * kKeysPerBlock + key);
    for (; d < head_dim; ++d) {
      for (std::size_t i = 0; i < kLanes; ++i) out[d * kKeysPerBlock + key + i] = rows[i][d];
    }
  }
}

float32x4_t exp_of_nonpositive(float32x4_t x) {
  const float32x4_t limit = vdupq_n_f32(-kExpLimit);
  const float32x4_t clamped = vmaxq_f32(limit, x);  // the operand order keeps a NaN in x
  const float32x4_t n = vrndnq_f32(vmulq_n_f32(clamped, kLog2E));
  const float32x4_t r = vfmsq_f32(vfmsq_f32(clamped, n, vdupq_n_f32(kLn2High)), n, vdupq_n_f32(kLn2Low));
  float32x4_t p = vdupq_n_f32(kExpCoefficients[4]);
  for (int i = 3; i >= 0; --i) p = vfmaq_f32(vdupq_n_f32(kExpCoefficients[i]), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f), vfmaq_f32(vdupq_n_f32(1.0f), p, r), r);
  const int32x4_t exponent = vaddq_s32(vshlq_n_s32(vcvtq_s32_f32(n), 23), vdupq_n_s32(127 << 23));
  const uint32x4_t product = vreinterpretq_u32_f32(vmulq_f32(p, vreinterpretq_f32_s32(exponent)));
  return vreinterpretq_f32_u32(vbicq_u32(product, vcltq_f32(x, limit)));
}

// Reduces 16 partial sums in the order of norm.h.
float horizontal_sum(const float32x4_t (&sums)[kVectors]) {
  const float32x4_t four = vaddq_f32(vaddq_f32(sums[0], sums[2]), vaddq_f32(sums[1], sums[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// sums[q][v] += factors[q][Lane] * vectors[v], with adjacent vectors in memory.
template <std::size_t N, std::size_t V, int Lane>
void add_products(float32x4_t (&sums)[N][V], const float32x4_t (&factors)[N], const float* vectors) {
  for (std::size_t v = 0; v < V; ++v) {
    const float32x4_t vector = vld1q_f32(vectors + v * kLanes);
    for (std::size_t q = 0; q < N; ++q) sums[q][v] = vfmaq_laneq_f32(sums[q][v], vector, factors[q], Lane);
  }
}

// sums[q][v] = the chain of fma(factors[q][i], vectors[i][v], sums[q][v]) over i from 0 to count - 1; the
// strides are the distances between rows of factors and between rows of vectors.
template <std::size_t N, std::size_t V>
void multiply(float32x4_t (&sums)[N][V], const float* factors, std::size_t factor_stride,
              const float* vectors, std::size_t vector_stride, std::size_t count) {
  float32x4_t four_factors[N];
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4, vectors += 4 * vector_stride) {
    for (std::size_t q = 0; q < N; ++q) four_factors[q] = vld1q_f32(factors + q * factor_stride + i);
    add_products<N, V, 0>(sums, four_factors, vectors);
    add_products<N, V, 1>(sums, four_factors, vectors + vector_stride);
    add_products<N, V, 2>(sums, four_factors, vectors + 2 * vector_stride);
    add_products<N, V, 3>(sums, four_factors, vectors + 3 * vector_stride);
  }
  for (; i < count; ++i, vectors += vector_stride) {
    for (std::size_t q = 0; q < N; ++q) four_factors[q] = vdupq_n_f32(factors[q * factor_stride + i]);
    add_products<N, V, 0>(sums, four_factors, vectors);
  }
}

// scores[q][key .. key + 15] of N queries.
template <std::size_t N>
void score(const KeyBlock& block, const float* queries, std::size_t key, float (*scores)[kKeysPerBlock]) {
  float32x4_t sums[N][kVectors];
#pragma GCC unroll 4
  for (std::size_t q = 0; q < N; ++q) {
    for (std::size_t v = 0; v < kVectors; ++v) sums[q][v] = vdupq_n_f32(0.0f);
  }
  multiply<N, kVectors>(sums, queries, block.head_dim, block.keys + key, kKeysPerBlock, block.head_dim);
#pragma GCC unroll 4
  for (std::size_t q = 0; q < N; ++q) {
    for (std::size_t v = 0; v < kVectors; ++v) vst1q_f32(scores[q] + key + v * kLanes, sums[q][v]);
  }
}

// Converts scores to weights, with 0 for invisible keys up to the next multiple of 16; `rescale` receives the
// factors `a` of attention.h.
template <std::size_t N>
void weigh(const QueryTile& tile, float (*scores)[kKeysPerBlock], float* rescale) {
  float differences[kLanes] = {};
  const std::size_t begin = tile.first / 16 * 16;
  for (std::size_t q = 0; q < N; ++q) {
    for (std::size_t key = begin; key < tile.first; ++key) scores[q][key] = -INFINITY;
    for (std::size_t key = tile.visible[q]; key % 16 != 0; ++key) scores[q][key] = -INFINITY;
    float32x4_t max = vdupq_n_f32(tile.maxima[q]);
    for (std::size_t key = begin; key < tile.visible[q]; key += kLanes) {
      max = vmaxq_f32(max, vld1q_f32(scores[q] + key));
    }
    const float new_max = vmaxvq_f32(max);
    differences[q] = tile.maxima[q] - new_max;
    tile.maxima[q] = new_max;
  }
  vst1q_f32(rescale, exp_of_nonpositive(vld1q_f32(differences)));
  for (std::size_t q = 0; q < N; ++q) {
    const float32x4_t max = vdupq_n_f32(tile.maxima[q]);
    float32x4_t sums[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) sums[v] = vdupq_n_f32(0.0f);
    for (std::size_t key = begin; key < tile.visible[q]; key += kVectors * kLanes) {
      for (std::size_t v = 0; v < kVectors; ++v) {
        float* const place = scores[q] + key + v * kLanes;
        const float32x4_t weight = exp_of_nonpositive(vsubq_f32(vld1q_f32(place), max));
        vst1q_f32(place, weight);
        sums[v] = vaddq_f32(sums[v], weight);
      }
    }
    tile.sums[q] = fmaf(tile.sums[q], rescale[q], horizontal_sum(sums));
  }
}

// outs[q][d .. d + V * 4 - 1] of N queries. A key that is visible only to later queries is not added to the
// earlier ones, not even multiplied by zero.
template <std::size_t N, std::size_t V>
void accumulate(const KeyBlock& block, const QueryTile& tile, const float (*weights)[kKeysPerBlock],
                const float* rescale, std::size_t d) {
  float32x4_t sums[N][V];
#pragma GCC unroll 4
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) {
      sums[q][v] = vmulq_n_f32(vld1q_f32(tile.outs[q] + d + v * kLanes), rescale[q]);
    }
  }
  const std::size_t first = tile.first, shared = tile.visible[0];
  multiply<N, V>(sums, weights[0] + first, kKeysPerBlock, block.values + first * block.head_dim + d,
                 block.head_dim, shared - first);
#pragma GCC unroll 4
  for (std::size_t q = 0; q < N; ++q) {
    const float* late_values = block.values + shared * block.head_dim + d;
    for (std::size_t key = shared; key < tile.visible[q]; ++key, late_values += block.head_dim) {
#pragma GCC unroll 4
      for (std::size_t v = 0; v < V; ++v) {
        sums[q][v] = vfmaq_n_f32(sums[q][v], vld1q_f32(late_values + v * kLanes), weights[q][key]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) vst1q_f32(tile.outs[q] + d + v * kLanes, sums[q][v]);
  }
}

// Computes the columns from d on, one by one.
template <std::size_t N>
void accumulate_rest(const KeyBlock& block, const QueryTile& tile, const float (*weights)[kKeysPerBlock],
                     const float* rescale, std::size_t d) {
  for (; d < block.head_dim; ++d) {
    for (std::size_t q = 0; q < N; ++q) {
      float sum = tile.outs[q][d] * rescale[q];
      for (std::size_t key = tile.first; key < tile.visible[q]; ++key) {
        sum = fmaf(weights[q][key], block.values[key * block.head_dim + d], sum);
      }
      tile.outs[q][d] = sum;
    }
  }
}

template <std::size_t N>
void attend_tile(const KeyBlock& block, const QueryTile& tile) {
  float weights[N][kKeysPerBlock], rescale[kLanes];
  constexpr std::size_t kAtOnce = kVectors * kLanes;
  for (std::size_t key = tile.first / kAtOnce * kAtOnce; key < tile.visible[N - 1]; key += kAtOnce) {
    score<N>(block, tile.queries, key, weights);
  }
  weigh<N>(tile, weights, rescale);
  std::size_t d = 0;
  for (; d + 16 <= block.head_dim; d += 16) accumulate<N, kVectors>(block, tile, weights, rescale, d);
  for (; d + 4 <= block.head_dim; d += 4) accumulate<N, 1>(block, tile, weights, rescale, d);
  accumulate_rest<N>(block, tile, weights, rescale, d);
}

constexpr AttendTileFunction* kAttendTile[kQueriesPerTile] = {attend_tile<1>, attend_tile<2>, attend_tile<3>,
                                                              attend_tile<4>};

constexpr AttentionOperations kOperations = {.rope = rope,
                                             .narrow = narrow,
                                             .round = round_plainly,
                                             .widen = widen_f32_f16_neon,
                                             .quantize = quantize_s8row_f32_neon,
                                             .dequantize = dequantize,
                                             .transpose = transpose,
                                             .attend_tile = kAttendTile,
                                             .queries_per_tile = kQueriesPerTile};

}  // namespace

void append_cache_f32_neon(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch) {
  append_blocked(args, begin, end, scratch, kOperations);
}

void attend_f32_f32_cache_neon(const AttentionArgs& args, std::size_t begin, std::size_t end,
                               float* scratch) {
  attend_blocked(args, begin, end, scratch, kOperations);
}

}  // namespace chunkrt
