// What attention's inputs and caches mean, in double precision.
#pragma once

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

// What a cache of s.length slots means for the position `row` of a head.
inline std::vector<double> cached(const std::vector<std::byte>& cache, const Shape& s, std::size_t head,
                                  std::size_t row) {
  const std::byte* bytes = cache.data() + (head * s.length + row) * cache_row_bytes(s.cache_type, s.head_dim);
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
                    static_cast<double>(read<float>(bytes + s.head_dim));
    }
  }
  return values;
}

inline std::vector<double> roped(const Prompt& prompt, std::size_t row, std::vector<double> x) {
  const std::size_t half = prompt.shape.rotary_dim / 2, table_row = prompt.shape.first_table_row + row;
  for (std::size_t i = 0; i < half; ++i) {
    const double cos = static_cast<double>(prompt.cos[table_row * half + i]);
    const double sin = static_cast<double>(prompt.sin[table_row * half + i]);
    const double first = x[i], second = x[i + half];
    x[i] = first * cos - second * sin;
    x[i + half] = second * cos + first * sin;
  }
  return x;
}

// head_dim columns of a row of qkv.
inline std::vector<double> head_of(const Prompt& prompt, std::size_t row, std::size_t column) {
  const float* x = prompt.qkv.data() + row * row_width(prompt.shape) + column;
  return {x, x + prompt.shape.head_dim};
}

}  // namespace chunkrt::testing
