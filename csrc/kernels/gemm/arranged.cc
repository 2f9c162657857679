// Rows arranged tile by tile, for AMX, and for its twin in the tests.
#include "kernels/gemm/arranged.h"

#include <algorithm>
#include <cstring>

#include "kernels/gemm/gemm.h"

namespace chunkrt {

std::size_t tiled_row_bytes(std::size_t groups) {
  return (groups * kGemmDepthPerGroup + kTiledBytes - 1) / kTiledBytes * kTiledBytes;
}

void tile_rows(const std::int8_t* values, std::size_t groups, std::size_t row_begin, std::size_t row_end,
               std::int8_t* arranged) {
  const std::size_t depth = groups * kGemmDepthPerGroup;
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const std::int8_t* const source = values + row * depth;
    std::int8_t* target =
        arranged + row / kTiledRows * kTiledRows * tiled_row_bytes(groups) + row % kTiledRows * kTiledBytes;
    for (std::size_t k = 0; k < depth; k += kTiledBytes, target += kTiledRows * kTiledBytes) {
      const std::size_t count = std::min(kTiledBytes, depth - k);
      std::memcpy(target, source + k, count);
      std::memset(target + count, 0, kTiledBytes - count);
    }
  }
}

}  // namespace chunkrt
