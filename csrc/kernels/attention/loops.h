// attention with vectors: the operations of blocked.h. One file for each instruction set includes this
// header.
#pragma once

#include <math.h>

#include <array>
#include <cstring>
#include <utility>

#include "kernels/attention/blocked.h"
#include "kernels/attention/seen_scores.h"
#include "kernels/lanes/exp.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

// Ropes 16 pairs of dimensions that are `half` apart, or the first ones of `rest`.
template <typename... Part>
CHUNKRT_LANES void rope_pairs(const float* input, const float* cos, const float* sin, std::size_t half,
                              Floats scales, float* out, Part... rest) {
  const Floats first = load(input, rest...), second = load(input + half, rest...);
  const Floats c = load(cos, rest...), s = load(sin, rest...);
  store(out, multiply_subtract(first, c, second * s) * scales, rest...);
  store(out + half, multiply_add(second, c, first * s) * scales, rest...);
}

void rope(const float* input, const float* cos, const float* sin, std::size_t head_dim,
          std::size_t rotary_dim, float scale, float* out) {
  const std::size_t half = rotary_dim / 2;
  const Floats scales = all(scale);
  std::size_t i = 0;
  for (; i + kLanes <= half; i += kLanes) rope_pairs(input + i, cos + i, sin + i, half, scales, out + i);
  if (i < half) rope_pairs(input + i, cos + i, sin + i, half, scales, out + i, Rest(half - i));
  for (i = rotary_dim; i < head_dim; ++i) out[i] = input[i] * scale;
}

void narrow(const float* input, std::uint16_t* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_halves(out + i, load(input + i));
  if (i < count) store_halves(out + i, load(input + i, Rest(count - i)), Rest(count - i));
}

void dequantize(const std::byte* row, std::size_t head_dim, const float* bias, float* out) {
  const auto* const values = reinterpret_cast<const std::int8_t*>(row);
  for (std::size_t i = 0, end; i < head_dim; i = end) {
    float scale;
    std::memcpy(&scale, row + head_dim + i / kInt8Group * sizeof(scale), sizeof(scale));
    end = head_dim - i < kInt8Group ? head_dim : i + kInt8Group;
    const Floats scales = all(scale);
    for (; i + kLanes <= end; i += kLanes) {
      const Floats added = bias == nullptr ? all(0.0f) : load(bias + i);
      store(out + i, multiply_add(load_bytes(values + i), scales, added));
    }
    if (i == end) continue;
    const Rest rest(end - i);
    const Floats added = bias == nullptr ? all(0.0f) : load(bias + i, rest);
    store(out + i, multiply_add(load_bytes(values + i, rest), scales, added), rest);
  }
}

// A tile of queries by keys, then by columns, keeps its sums in registers.
constexpr std::size_t kVectors = kProductVectors, kKeysAtOnce = kVectors * kLanes;
static_assert(kKeysPerBlock % kKeysAtOnce == 0 && kProductRows <= kMaxQueriesPerTile);

// Computes kKeysAtOnce scores of N queries from `key` on.
template <std::size_t N>
void score(const KeyBlock& block, const float* queries, std::size_t key, float (*scores)[kKeysPerBlock]) {
  Floats sums[N][kVectors];
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) sums[q][v] = all(0.0f);
  }
  add_products(sums, queries, block.head_dim, block.keys + key, kKeysPerBlock, block.head_dim,
               [](const float* keys, std::size_t) { return load(keys); });
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) store(scores[q] + key + v * kLanes, sums[q][v]);
  }
}

// Converts scores to weights, with 0 for invisible keys up to the next multiple of 16; `rescale` receives the
// factors `a` of attention.h.
template <std::size_t N>
void weigh(const QueryTile& tile, float (*scores)[kKeysPerBlock], float* rescale) {
  float differences[kLanes] = {};
  const std::size_t begin = tile.first / kLanes * kLanes;
  for (std::size_t q = 0; q < N; ++q) {
    Floats maximum = all(tile.maxima[q]);
    for (std::size_t key = begin; key < tile.visible[q]; key += kLanes) {
      maximum = max(load_seen(scores[q], key, tile.first, tile.visible[q]), maximum);
    }
    const float new_maximum = largest(maximum);
    differences[q] = tile.maxima[q] - new_maximum;
    tile.maxima[q] = new_maximum;
  }
  store_at_least<N>(rescale, exp_of_nonpositive(load(differences)));
  for (std::size_t q = 0; q < N; ++q) {
    const Floats maximum = all(tile.maxima[q]);
    Floats weights = all(0.0f);
    for (std::size_t key = begin; key < tile.visible[q]; key += kLanes) {
      const Floats seen = load_seen(scores[q], key, tile.first, tile.visible[q]);
      const Floats weight = exp_of_nonpositive(seen - maximum);
      store(scores[q] + key, weight);
      weights = weights + weight;
    }
    tile.sums[q] = fmaf(tile.sums[q], rescale[q], sum(weights));
  }
}

// Computes V vectors of columns of N queries from column d on; the last vector has `last_columns`, and 16 if
// IsWhole. A key that is visible only to later queries is not added to the earlier ones, not even multiplied
// by zero.
template <std::size_t N, std::size_t V, bool IsWhole>
[[gnu::noinline]] void accumulate(const KeyBlock& block, const QueryTile& tile,
                                  const float (*weights)[kKeysPerBlock], const float* rescale, std::size_t d,
                                  std::size_t last_columns) {
  const Rest rest(last_columns);
  const auto load_vector = [=](const float* from, std::size_t v) {
    return IsWhole || v + 1 < V ? load(from) : load(from, rest);
  };
  Floats sums[N][V];
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < V; ++v) {
      sums[q][v] = load_vector(tile.outs[q] + d + v * kLanes, v) * all(rescale[q]);
    }
  }
  const std::size_t first = tile.first, shared = tile.visible[0];
  add_products(sums, weights[0] + first, kKeysPerBlock, block.values + first * block.head_dim + d,
               block.head_dim, shared - first, load_vector);
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
    const float* late_values = block.values + shared * block.head_dim + d;
    for (std::size_t key = shared; key < tile.visible[q]; ++key, late_values += block.head_dim) {
      const Floats weight = all(weights[q][key]);
#pragma GCC unroll 2
      for (std::size_t v = 0; v < V; ++v) {
        sums[q][v] = multiply_add(weight, load_vector(late_values + v * kLanes, v), sums[q][v]);
      }
    }
#pragma GCC unroll 2
    for (std::size_t v = 0; v < V; ++v) {
      store(tile.outs[q] + d + v * kLanes, sums[q][v], IsWhole || v + 1 < V ? kLanes : last_columns);
    }
  }
}

template <std::size_t N>
void attend_tile(const KeyBlock& block, const QueryTile& tile) {
  float weights[N][kKeysPerBlock], rescale[kLanes];
  for (std::size_t key = tile.first / kKeysAtOnce * kKeysAtOnce; key < tile.visible[N - 1];
       key += kKeysAtOnce) {
    score<N>(block, tile.queries, key, weights);
  }
  if (tile.soft_cap > 0.0f) {
    for (std::size_t q = 0; q < N; ++q) cap_scores(weights[q], tile.first, tile.visible[q], tile.soft_cap);
  }
  weigh<N>(tile, weights, rescale);
  std::size_t d = 0;
  for (; d + kVectors * kLanes <= block.head_dim; d += kVectors * kLanes) {
    accumulate<N, kVectors, !kHasMasks>(block, tile, weights, rescale, d, kLanes);
  }
  const std::size_t columns = block.head_dim - d;
  if (kVectors == 2 && columns > kLanes) {
    accumulate<N, kVectors, false>(block, tile, weights, rescale, d, columns - kLanes);
  } else if (columns == kLanes) {
    accumulate<N, 1, !kHasMasks>(block, tile, weights, rescale, d, kLanes);
  } else if (columns > 0) {
    accumulate<N, 1, false>(block, tile, weights, rescale, d, columns);
  }
}

// Element [i] processes i + 1 queries.
template <std::size_t... I>
constexpr std::array<AttendTileFunction*, sizeof...(I)> attend_tiles(std::index_sequence<I...>) {
  return {attend_tile<I + 1>...};
}
constexpr auto kAttendTile = attend_tiles(std::make_index_sequence<kProductRows>());

// Fills num_keys columns, rounded up to a multiple of kKeysAtOnce; the columns past num_keys are copies of
// the last key.
void transpose_keys(const float* keys, std::size_t num_keys, std::size_t head_dim, float* out) {
  for (std::size_t key = 0; key < num_keys || key % kKeysAtOnce != 0; key += kTransposedRows) {
    const float* rows[kTransposedRows];
    for (std::size_t i = 0; i < kTransposedRows; ++i) {
      rows[i] = keys + (key + i < num_keys ? key + i : num_keys - 1) * head_dim;
    }
    for (std::size_t d = 0; d < head_dim; d += kTransposedRows) {
      transpose(rows, d, head_dim - d, out + d * kKeysPerBlock + key, kKeysPerBlock);
    }
  }
}

constexpr AttentionOperations kOperations = {.rope = rope,
                                             .narrow = narrow,
                                             .widen = CHUNKRT_NAME(widen_f32_f16),
                                             .quantize = CHUNKRT_NAME(quantize_s8row_f32),
                                             .dequantize = dequantize,
                                             .transpose = transpose_keys,
                                             .attend_tile = kAttendTile.data(),
                                             .queries_per_tile = kProductRows};

}  // namespace

void CHUNKRT_NAME(append_cache_f32)(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                    float* scratch) {
  append_blocked(args, begin, end, scratch, kOperations);
}

void CHUNKRT_NAME(attend_f32_f32_cache)(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                        float* scratch) {
  attend_blocked(args, begin, end, scratch, kOperations);
}

}  // namespace chunkrt
