// Runs a prompt through the two phases of attention, in arbitrary chunks and pieces.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"

namespace chunkrt::testing {

struct Shape {
  std::size_t num_heads, num_kv_heads, head_dim, rotary_dim, length;
  CacheType cache_type;
  std::size_t window = 0;
  bool has_raw_keys = false;
  std::size_t first_table_row = 0;
  float bias = 0.0f;  // the largest part common to all keys, which an int8 cache omits
  float soft_cap = 0.0f;
  bool has_sinks = false;
  DualChunks chunks = {};
};

// The shapes cover groups of 1, 2, 3, 5 and 40 heads, head dims that are and are not multiples of the
// kernels' vectors, lengths and windows around the block size, and windows larger than the prompt.
inline constexpr Shape kShapes[] = {
    {1, 1, 1, 0, 3, CacheType::float32},
    {2, 1, 3, 2, 7, CacheType::float16},
    {2, 2, 8, 8, 65, CacheType::float32},
    {6, 2, 20, 12, 70, CacheType::float16},
    {9, 3, 64, 64, 95, CacheType::float16},
    {9, 3, 64, 64, 130, CacheType::float32},
    {5, 1, 72, 32, 40, CacheType::float32},
    {4, 2, 80, 80, 129, CacheType::float16},
    {40, 1, 16, 16, 66, CacheType::float16},
    {2, 1, 96, 24, 64, CacheType::float32},
    {2, 1, 128, 128, 63, CacheType::float16},
    {3, 3, 33, 18, 193, CacheType::float32},
    {9, 3, 64, 64, 95, CacheType::int8},
    {5, 1, 33, 18, 130, CacheType::int8},
    {2, 2, 1, 0, 65, CacheType::int8},
    {4, 2, 24, 16, 70, CacheType::float32, 1},
    {1, 1, 16, 16, 130, CacheType::float32, 5},
    {9, 3, 20, 12, 200, CacheType::float16, 5},
    {3, 1, 33, 18, 193, CacheType::float32, 63},
    {8, 2, 64, 64, 193, CacheType::float16, 64},
    {2, 2, 8, 8, 257, CacheType::float32, 65},
    {4, 1, 72, 32, 200, CacheType::int8, 65},
    {3, 1, 16, 16, 90, CacheType::float16, 1000},
    {9, 3, 64, 64, 95, CacheType::float16, 0, true},
    {5, 1, 33, 18, 193, CacheType::float32, 0, true, 7},
    {4, 2, 20, 12, 200, CacheType::int8, 65, true, 3},
    {2, 1, 128, 128, 70, CacheType::int8},
    {6, 2, 44, 32, 130, CacheType::int8, 0, true, 0, 30.0f},
    {9, 3, 64, 64, 95, CacheType::int8, 40, true, 7, 20.0f},
    {2, 1, 16, 8, 193, CacheType::float32, 5, true},
    {9, 3, 20, 12, 130, CacheType::float16, 0, false, 0, 0.0f, 0.75f},
    {3, 1, 33, 18, 95, CacheType::float32, 0, false, 0, 0.0f, 0.0f, true},
    {6, 2, 64, 64, 193, CacheType::float16, 65, false, 0, 0.0f, 1.5f, true},
    {9, 3, 20, 12, 200, CacheType::float32, 0, false, 0, 0.0f, 0.0f, false, {.period = 70, .limit = 90}},
    {3, 1, 33, 18, 130, CacheType::float16, 0, false, 0, 0.0f, 0.75f, true, {.period = 16, .limit = 24}},
    {4, 2, 24, 16, 95, CacheType::int8, 0, true, 0, 20.0f, 0.0f, false, {.period = 64, .limit = 70}},
};

// Caches for attention in bfloat16 only.
inline constexpr Shape kTiledShapes[] = {
    {1, 1, 1, 0, 3, CacheType::bfloat16},
    {9, 3, 64, 64, 95, CacheType::bfloat16},
    {9, 3, 64, 64, 130, CacheType::bfloat16},
    {40, 1, 16, 16, 66, CacheType::bfloat16},
    {3, 3, 33, 18, 193, CacheType::bfloat16},
    {4, 2, 80, 80, 129, CacheType::bfloat16},
    {4, 2, 24, 16, 70, CacheType::bfloat16, 1},
    {9, 3, 20, 12, 200, CacheType::bfloat16, 5},
    {8, 2, 64, 64, 193, CacheType::bfloat16, 64},
    {4, 1, 72, 32, 200, CacheType::bfloat16, 65},
    {6, 2, 20, 12, 130, CacheType::bfloat16, 65, false, 0, 0.0f, 0.75f, true},
    {9, 3, 20, 12, 200, CacheType::bfloat16, 0, false, 0, 0.0f, 0.0f, true, {.period = 70, .limit = 90}},
    {3, 1, 33, 18, 95, CacheType::bfloat16, 0, false, 0, 0.0f, 0.0f, false, {.period = 16, .limit = 24}},
};

inline std::string describe(const Shape& shape) {
  return std::to_string(shape.num_heads) + "/" + std::to_string(shape.num_kv_heads) + " heads of " +
         std::to_string(shape.head_dim) + ", rotary " + std::to_string(shape.rotary_dim) + ", " +
         std::to_string(shape.length) + " rows, " +
         (shape.cache_type == CacheType::float16    ? "float16"
          : shape.cache_type == CacheType::int8     ? "int8"
          : shape.cache_type == CacheType::bfloat16 ? "bfloat16"
                                                    : "float32") +
         ", window " + std::to_string(shape.window) + (shape.has_raw_keys ? ", raw keys" : "") +
         (shape.bias > 0.0f ? " less biases up to " + std::to_string(shape.bias) : "") +
         (shape.soft_cap > 0.0f ? ", capped at " + std::to_string(shape.soft_cap) : "") +
         (shape.has_sinks ? ", sinks" : "") +
         (shape.chunks.period > 0 ? ", chunks of " + std::to_string(shape.chunks.period) : "");
}

// The position that a key is roped for.
inline std::size_t key_position(const Shape& s, std::size_t key) {
  return s.chunks.period == 0 ? key : key % s.chunks.period;
}

// The position that the query of a row is roped for where it meets a key.
inline std::size_t query_position(const Shape& s, std::size_t row, std::size_t key) {
  const std::size_t period = s.chunks.period;
  if (period == 0) return row;
  const std::size_t chunks_back = row / period - key / period;
  if (chunks_back == 0) return row % period;
  return std::min(chunks_back == 1 ? row % period + period : 2 * period - 1, s.chunks.limit);
}

inline std::size_t row_width(const Shape& s) { return (s.num_heads + 2 * s.num_kv_heads) * s.head_dim; }
inline std::size_t out_width(const Shape& s) { return s.num_heads * s.head_dim; }
inline float scale_of(const Shape& s) { return 1.0f / std::sqrt(static_cast<float>(s.head_dim)); }

// [num_kv_heads * head_dim]: small, except in every fifth dimension.
inline std::vector<float> key_biases(const Shape& s) {
  std::vector<float> biases = Random(2).floats(s.num_kv_heads * s.head_dim, s.bias == 0.0f ? 0.0f : 1.0f);
  for (std::size_t i = 3; i < biases.size(); i += 5) biases[i] = i % 2 == 0 ? s.bias : -s.bias;
  return biases;
}

// [num_heads]: below, among and far above the scores.
inline std::vector<float> sinks_of(const Shape& s) {
  std::vector<float> sinks = Random(3).floats(s.num_heads, 6.0f);
  sinks[0] = s.num_heads > 2 ? 100.0f : 0.5f;
  return sinks;
}

struct Kernels {
  AttentionFunction* append;
  AttentionFunction* attend;
  AttentionMath math = AttentionMath::float32;
  bool are_caught = false;  // some trapped instructions, each with a signal
};

// With trapped instructions, a long prompt takes seconds row by row; such prompts are short. Of the other
// chunks, those of 33 rows begin at any place of a block.
inline bool has_time_for(const Kernels& kernels, const Shape& shape, std::size_t chunk) {
  return !kernels.are_caught || chunk == 33 || (chunk == 1 && shape.length <= 70);
}

// One prompt of shape.length rows: the inputs, in guarded memory.
struct Prompt {
  explicit Prompt(const Shape& shape_, float limit = 2.0f)
      : shape(shape_),
        qkv(Random(1).floats(shape.length * row_width(shape), limit)),
        cos((shape.first_table_row + shape.length) * shape.rotary_dim / 2),
        sin(cos.size()) {
    const std::size_t half = shape.rotary_dim / 2;
    for (std::size_t pair = 0; pair < half; ++pair) {
      const double step = std::pow(10000.0, -static_cast<double>(pair) / static_cast<double>(half));
      for (std::size_t i = pair; i < cos.size(); i += half) {
        const double angle = static_cast<double>(i / half) * step;
        cos[i] = static_cast<float>(std::cos(angle));
        sin[i] = static_cast<float>(std::sin(angle));
      }
    }
    const std::vector<float> biases = key_biases(shape);
    for (std::size_t row = 0; row < shape.length; ++row) {
      float* const keys = qkv.data() + row * row_width(shape) + shape.num_heads * shape.head_dim;
      for (std::size_t i = 0; i < biases.size(); ++i) keys[i] += biases[i];
    }
  }

  Shape shape;
  GuardedBuffer<float> qkv, cos, sin;
};

// Results of a run.
struct Result {
  std::vector<float> out;
  std::vector<std::byte> keys, values;
};

struct Run {
  std::size_t chunk = 1000;           // rows of a call
  std::size_t items_per_call = 1000;  // items per call of either phase
  bool is_backwards = false;          // calls within a phase, last first
  bool is_ring = false;               // the caches have only as many slots as such chunks need
  std::size_t first_position = 0;     // position in the prompt; a multiple of the slots
  std::size_t queries_per_item = 0;   // 0: the default
};

// Slots of a cache that holds all positions.
inline std::size_t cache_slots(const Shape& s) {
  return s.cache_type == CacheType::bfloat16 ? (s.length + 63) / 64 * 64 : s.length;
}

// The smallest multiple of 64 that is allowed for a ring.
inline std::size_t ring_slots(const Shape& s, std::size_t rows) {
  return (s.window + rows - 1 + 63) / 64 * 64;
}

inline void call_in_pieces(AttentionFunction* function, const AttentionArgs& args, std::size_t num_items,
                           const Run& run, float* scratch) {
  const std::size_t num_calls = (num_items + run.items_per_call - 1) / run.items_per_call;
  for (std::size_t i = 0; i < num_calls; ++i) {
    const std::size_t begin = (run.is_backwards ? num_calls - 1 - i : i) * run.items_per_call;
    function(args, begin, std::min(begin + run.items_per_call, num_items), scratch);
  }
}

inline Result attend_prompt(const Prompt& prompt, const Kernels& kernels, const Run& run = {}) {
  const Shape& s = prompt.shape;
  const std::size_t ring = ring_slots(s, std::min(run.chunk, s.length));
  const std::size_t slots = run.is_ring ? ring : cache_slots(s);
  // Cache content beyond the appended positions must not affect the result. If all bits are set, each type
  // contains NaNs; int8 contains them as scales.
  const std::size_t row_bytes = cache_row_bytes(s.cache_type, s.head_dim);
  const std::vector<std::byte> nans(s.num_kv_heads * slots * row_bytes, std::byte{0xff});
  GuardedBuffer<std::byte> keys(nans), values(nans);
  GuardedBuffer<float> biases(key_biases(s)), sinks(sinks_of(s));
  GuardedBuffer<float> scratch(attention_scratch_floats(s.head_dim, kernels.math));
  std::fill_n(scratch.data(), scratch.size(), std::numeric_limits<float>::quiet_NaN());
  Result result;
  for (std::size_t position = 0; position < s.length; position += run.chunk) {
    const std::size_t rows = std::min(run.chunk, s.length - position);
    GuardedBuffer<float> qkv(std::vector<float>(prompt.qkv.data() + position * row_width(s),
                                                prompt.qkv.data() + (position + rows) * row_width(s)));
    GuardedBuffer<float> out(rows * out_width(s));
    std::fill_n(out.data(), out.size(), std::numeric_limits<float>::quiet_NaN());
    const AttentionArgs args = {.qkv = qkv.data(),
                                .cos = prompt.cos.data(),
                                .sin = prompt.sin.data(),
                                .key_cache = keys.data(),
                                .value_cache = values.data(),
                                .cache_type = s.cache_type,
                                .has_raw_keys = s.has_raw_keys,
                                .key_bias = s.bias > 0.0f ? biases.data() : nullptr,
                                .out = out.data(),
                                .rows = rows,
                                .position = run.first_position + position,
                                .table_row = s.first_table_row + position,
                                .capacity = slots,
                                .window = s.window,
                                .num_heads = s.num_heads,
                                .num_kv_heads = s.num_kv_heads,
                                .head_dim = s.head_dim,
                                .rotary_dim = s.rotary_dim,
                                .scale = scale_of(s),
                                .soft_cap = s.soft_cap,
                                .sinks = s.has_sinks ? sinks.data() : nullptr,
                                .math = kernels.math,
                                .queries_per_item = run.queries_per_item,
                                .dual_chunks = s.chunks};
    call_in_pieces(kernels.append, args, rows, run, scratch.data());
    call_in_pieces(kernels.attend, args, attend_items(args), run, scratch.data());
    result.out.insert(result.out.end(), out.data(), out.data() + out.size());
  }
  result.keys = keys.copy();
  result.values = values.copy();
  return result;
}

}  // namespace chunkrt::testing
