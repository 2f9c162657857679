// The Hadamard transform of tile_operations.h with vectors. One file for each instruction set includes this
// header; nothing here is visible outside of that file.
#pragma once

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

void mix(float* row, std::size_t depth) {
  for (std::size_t d = 0; d < depth; d += kLanes) {
    const Floats x = add_and_subtract<2>(add_and_subtract<1>(load(row + d)));
    store(row + d, add_and_subtract<8>(add_and_subtract<4>(x)));
  }
  for (std::size_t distance = kLanes; depth % (2 * distance) == 0; distance *= 2) {
    for (std::size_t d = 0; d < depth; d += 2 * distance) {
      for (std::size_t i = d; i < d + distance; i += kLanes) {
        const Floats x = load(row + i), y = load(row + i + distance);
        store(row + i, x + y);
        store(row + i + distance, x - y);
      }
    }
  }
}

}  // namespace
}  // namespace chunkrt
