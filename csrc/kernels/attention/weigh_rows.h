// The operations of tile_operations.h other than packing, with vectors. One file for each instruction set
// includes this header.
#pragma once

#include "kernels/attention/loops.h"
#include "kernels/attention/tile_operations.h"

namespace chunkrt {
namespace {

void round_to_bfloat(const float* values, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) store_upper_halves(out + i, to_bfloats(load(values + i)));
}

// The new maximum of a row.
float find_maximum(const ScoredRows& rows, std::size_t row) {
  Floats maximum = all(rows.maxima[row]);
#pragma GCC unroll 4
  for (std::size_t key = 0; key < kKeysPerBlock; key += kLanes) {
    const float* const scores = rows.scores + row * kKeysPerBlock;
    maximum = max(load_seen(scores, key, rows.first[row], rows.visible[row]), maximum);
  }
  return largest(maximum);
}

// Converts the scores of a row to weights, and returns their sum.
float weigh_row(const ScoredRows& rows, std::size_t row) {
  const float* const scores = rows.scores + row * kKeysPerBlock;
  const Floats maximum = all(rows.maxima[row]);
  Floats weights = all(0.0f);
#pragma GCC unroll 4
  for (std::size_t key = 0; key < kKeysPerBlock; key += kLanes) {
    const Floats seen = load_seen(scores, key, rows.first[row], rows.visible[row]);
    const Ints weight = to_bfloats(exp_of_nonpositive(seen - maximum));
    store_upper_halves(rows.weights + row * kKeysPerBlock + key, weight);
    weights = weights + from_bits(weight & all_ints(static_cast<int>(0xffff0000u)));
  }
  return sum(weights);
}

void weigh_rows(const ScoredRows& rows) {
  for (std::size_t begin = 0; begin < rows.num_rows; begin += kLanes) {
    const std::size_t end = begin + kLanes < rows.num_rows ? begin + kLanes : rows.num_rows;
    float differences[kLanes] = {}, rescale[kLanes];
    for (std::size_t row = begin; row < end; ++row) {
      if (rows.first[row] >= rows.visible[row]) continue;
      if (rows.soft_cap > 0.0f) {
        cap_scores(rows.scores + row * kKeysPerBlock, rows.first[row], rows.visible[row], rows.soft_cap);
      }
      const float maximum = find_maximum(rows, row);
      differences[row - begin] = rows.maxima[row] - maximum;
      rows.maxima[row] = maximum;
    }
    store(rescale, exp_of_nonpositive(load(differences)));
    for (std::size_t row = begin; row < end; ++row) {
      if (rows.first[row] >= rows.visible[row]) {
        std::memset(rows.weights + row * kKeysPerBlock, 0, kKeysPerBlock * sizeof(*rows.weights));
        continue;
      }
      const float factor = rescale[row - begin];
      rows.sums[row] = fmaf(rows.sums[row], factor, weigh_row(rows, row));
      if (factor == 1.0f) continue;
      float* const out = rows.outs + row * rows.columns;
      for (std::size_t d = 0; d < rows.columns; d += kLanes) store(out + d, load(out + d) * all(factor));
    }
  }
}

}  // namespace
}  // namespace chunkrt
