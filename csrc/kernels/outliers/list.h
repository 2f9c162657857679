// Listing the outliers of a row once its limit is known: rare, and the same for every instruction set.
#pragma once

#include <cmath>

#include "kernels/outliers/outliers.h"

namespace chunkrt {
namespace {

// Lists the outliers of a row whose values `rest` holds already, and sets them to 0 there.
inline void take_listed(const TakeOutliersArgs& args, std::size_t row, float limit) {
  float* rest = args.rest + row * args.width;
  std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
  float* values = args.outliers.values + row * args.outliers.capacity;
  std::int32_t count = 0;
  for (std::size_t k = 0; k < args.width; ++k) {
    if (!(std::fabs(rest[k]) > limit)) continue;
    channels[count] = static_cast<std::int32_t>(k);
    values[count++] = rest[k];
    rest[k] = 0.0f;
  }
  args.outliers.counts[row] = count;
}

}  // namespace
}  // namespace chunkrt
