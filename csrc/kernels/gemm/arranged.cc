#include "kernels/gemm/arranged.h"

#include <algorithm>
#include <cstring>

#include "kernels/gemm/gemm.h"

namespace chunkrt {

void tile_rows(const std::int8_t* values, std::size_t groups, std::size_t row_begin, std::size_t row_end,
               std::int8_t* arranged) {
  constexpr std::size_t kRows = 16, kBytes = 64;
  const std::size_t depth = groups * kGemmDepthPerGroup;
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const std::int8_t* const source = values + row * depth;
    std::int8_t* target = arranged + row / kRows * kRows * tiled_row_bytes(groups) + row % kRows * kBytes;
    for (std::size_t k = 0; k < depth; k += kBytes, target += kRows * kBytes) {
      const std::size_t count = std::min(kBytes, depth - k);
      std::memcpy(target, source + k, count);
      std::memset(target + count, 0, kBytes - count);
    }
  }
}

}  // namespace chunkrt
