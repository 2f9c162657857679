// Scores of a block of keys of which a row may see only a part. One file for each instruction set includes
// this header; nothing here is visible outside of that file.
#pragma once

#include <math.h>

#include "kernels/lanes/exp.h"

namespace chunkrt {
namespace {

// Caps the scores of the keys [first, visible), and of others in their groups of 16.
void cap_scores(float* scores, std::size_t first, std::size_t visible, float soft_cap) {
  const Floats cap = all(soft_cap), inverse = all(1.0f / soft_cap);
  for (std::size_t key = first / kLanes * kLanes; key < visible; key += kLanes) {
    store(scores + key, hyperbolic_tangent(load(scores + key) * inverse) * cap);
  }
}

// The scores of 16 adjacent keys from `key` on, with -inf for keys outside of [first, visible).
CHUNKRT_LANES Floats load_seen(const float* scores, std::size_t key, std::size_t first, std::size_t visible) {
  if (first <= key && key + kLanes <= visible) return load(scores + key);
  const int offset = static_cast<int>(key);
  const Mask is_seen = lanes_between(static_cast<int>(first) - offset, static_cast<int>(visible) - offset);
  return select(is_seen, load(scores + key), all(-INFINITY));
}

}  // namespace
}  // namespace chunkrt
