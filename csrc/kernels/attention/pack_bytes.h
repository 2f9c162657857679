// The conversion of rows to int8 of tile_operations.h, with vectors. One file for each instruction set
// includes this header; nothing here is visible outside of that file.
#pragma once

#include <bit>

#include "kernels/attention/tile_operations.h"
#include "kernels/lanes/lanes.h"

namespace chunkrt {
namespace {

// The sum of each two lanes whose numbers differ in the bit `Distance`, and their difference in the second.
template <int Distance>
CHUNKRT_LANES Floats add_and_subtract(Floats x) {
  float signs[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) signs[i] = (i & Distance) != 0 ? -1.0f : 1.0f;
  return multiply_add(x, load(signs), exchange<Distance>(x));
}

CHUNKRT_LANES Floats mix_lanes(Floats x) {
  x = add_and_subtract<2>(add_and_subtract<1>(x));
  return add_and_subtract<8>(add_and_subtract<4>(x));
}

// Converts mixed vectors, x(0) to x(num_vectors - 1), as quantize_s8row does.
template <typename Vectors>
CHUNKRT_LANES void quantize_vectors(std::size_t num_vectors, std::uint16_t* out, Vectors x) {
  const ByteRow row(out, num_vectors * kLanes);
  const Ints magnitude = all_ints(0x7fffffff);
  Ints most = all_ints(0);
  for (std::size_t v = 0; v < num_vectors; ++v) most = max(most, bits_of(x(v)) & magnitude);
  const std::int32_t bits = largest(most);
  const bool is_finite = bits < 0x7f800000;
  const float found = std::bit_cast<float>(bits);
  const bool is_zero = !is_finite || found < kQuantizeSmallestMagnitude;
  const Floats inverse = all(is_zero ? 0.0f : 127.0f / found);
  Ints sums = all_ints(0);
  for (std::size_t v = 0; v < num_vectors; ++v) {
    const Ints rounded = is_zero ? all_ints(0) : to_ints(x(v) * inverse);
    sums = sums + rounded;
    store_bytes(row.values + v * kLanes, rounded);
  }
  *row.sum = sum(sums);
  *row.scale = !is_finite ? std::bit_cast<float>(0x7fc00000) : is_zero ? 0.0f : found / 127.0f;
}

// A row that fits registers.
template <std::size_t V>
CHUNKRT_LANES void pack_vectors(const float* row, std::uint16_t* out) {
  Floats x[V];
#pragma GCC unroll 8
  for (std::size_t v = 0; v < V; ++v) x[v] = mix_lanes(load(row + v * kLanes));
#pragma GCC unroll 3
  for (std::size_t distance = 1; distance < V; distance *= 2) {
#pragma GCC unroll 8
    for (std::size_t v = 0; v < V; ++v) {
      if ((v & distance) != 0) continue;
      const Floats left = x[v], right = x[v + distance];
      x[v] = left + right;
      x[v + distance] = left - right;
    }
  }
  quantize_vectors(V, out, [&x](std::size_t v) { return x[v]; });
}

void pack_bytes(float* row, std::size_t depth, std::uint16_t* out) {
  if (depth == 4 * kLanes) return pack_vectors<4>(row, out);
  if (depth == 8 * kLanes) return pack_vectors<8>(row, out);
  for (std::size_t d = 0; d < depth; d += kLanes) store(row + d, mix_lanes(load(row + d)));
  for (std::size_t distance = kLanes; depth % (2 * distance) == 0; distance *= 2) {
    for (std::size_t d = 0; d < depth; d += 2 * distance) {
      for (std::size_t i = d; i < d + distance; i += kLanes) {
        const Floats x = load(row + i), y = load(row + i + distance);
        store(row + i, x + y);
        store(row + i + distance, x - y);
      }
    }
  }
  quantize_vectors(depth / kLanes, out, [row](std::size_t v) { return load(row + v * kLanes); });
}

}  // namespace
}  // namespace chunkrt
