// The values of attention's inputs and caches, in double precision.
#pragma once

#include <bit>
#include <cstring>
#include <vector>

#include "tests/attention_prompt.h"
#include "tests/half.h"

namespace chunkrt::testing {

template <typename T>
T read(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

// Bias that an int8 cache omits from a head's keys.
inline std::vector<double> left_out(const Shape& s, std::size_t head, bool are_keys) {
  if (!are_keys || s.bias == 0.0f) return std::vector<double>(s.head_dim);
  const std::vector<float> biases = key_biases(s);
  const auto first = biases.begin() + static_cast<std::ptrdiff_t>(head * s.head_dim);
  return {first, first + static_cast<std::ptrdiff_t>(s.head_dim)};
}

// The values of a head at the position `row` in a cache of all positions.
inline std::vector<double> cached(const std::vector<std::byte>& cache, const Shape& s, std::size_t head,
                                  std::size_t row, bool are_keys) {
  const std::size_t row_bytes = cache_row_bytes(s.cache_type, s.head_dim);
  const std::byte* const first = cache.data() + head * cache_slots(s) * row_bytes;
  const std::byte* const bytes = first + row * row_bytes;
  const std::vector<double> bias = left_out(s, head, are_keys);
  std::vector<double> values(s.head_dim);
  for (std::size_t d = 0; d < s.head_dim; ++d) {
    switch (s.cache_type) {
      case CacheType::float32:
        values[d] = static_cast<double>(read<float>(bytes + d * 4));
        break;
      case CacheType::float16:
        values[d] = half_value(read<std::uint16_t>(bytes + d * 2));
        break;
      case CacheType::int8:
        values[d] = static_cast<double>(read<std::int8_t>(bytes + d)) *
                        static_cast<double>(read<float>(bytes + s.head_dim + d / 32 * 4)) +
                    bias[d];
        break;
      case CacheType::bfloat16: {
        const std::size_t depth = row_bytes / 2, block = row / 64 * 64 * depth, in_block = row % 64;
        const std::size_t index = are_keys
                                      ? in_block / 16 * 16 * depth + d / 2 * 32 + in_block % 16 * 2 + d % 2
                                      : d / 16 * 1024 + in_block / 2 * 32 + d % 16 * 2 + in_block % 2;
        const std::uint32_t bits = read<std::uint16_t>(first + (block + index) * 2);
        values[d] = static_cast<double>(std::bit_cast<float>(bits << 16));
      }
    }
  }
  return values;
}

inline std::vector<double> roped(const Prompt& prompt, std::size_t position, std::vector<double> x) {
  const std::size_t half = prompt.shape.rotary_dim / 2, table_row = prompt.shape.first_table_row + position;
  for (std::size_t i = 0; i < half; ++i) {
    const double cos = static_cast<double>(prompt.cos[table_row * half + i]);
    const double sin = static_cast<double>(prompt.sin[table_row * half + i]);
    const double first = x[i], second = x[i + half];
    x[i] = first * cos - second * sin;
    x[i + half] = second * cos + first * sin;
  }
  return x;
}

// A score after the cap. The derivative of the cap is at most 1, so errors do not grow.
inline double capped(const Shape& s, double score) {
  const double cap = static_cast<double>(s.soft_cap);
  return cap > 0.0 ? cap * std::tanh(score / cap) : score;
}

// The score of a head's sink; -infinity without sinks.
inline double sink_of(const Shape& s, std::size_t head) {
  return s.has_sinks ? static_cast<double>(sinks_of(s)[head]) : -std::numeric_limits<double>::infinity();
}

// head_dim columns of a row of qkv.
inline std::vector<double> head_of(const Prompt& prompt, std::size_t row, std::size_t column) {
  const float* x = prompt.qkv.data() + row * row_width(prompt.shape) + column;
  return {x, x + prompt.shape.head_dim};
}

}  // namespace chunkrt::testing
