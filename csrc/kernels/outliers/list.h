// The code that lists an outlier: a rare case, common to all instruction sets.
#pragma once

#include "kernels/outliers/outliers.h"

namespace chunkrt {
namespace {

// Appends one outlier of a row to the row's list, and sets it to 0 in `rest`.
inline void take_one(const TakeOutliersArgs& args, std::size_t row, std::size_t channel) {
  const std::size_t place =
      row * args.outliers.capacity + static_cast<std::size_t>(args.outliers.counts[row]++);
  float& value = args.rest[row * args.width + channel];
  args.outliers.channels[place] = static_cast<std::int32_t>(channel);
  args.outliers.values[place] = value;
  value = 0.0f;
}

}  // namespace
}  // namespace chunkrt
