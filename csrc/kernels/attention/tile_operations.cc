// Operand sizes of attention with tiles, and the choice of the remaining operations for this processor.
#include "kernels/attention/tile_operations.h"

#include "kernels/isa.h"

namespace chunkrt {

TileSizes tile_sizes(std::size_t head_dim) {
  const std::size_t depth = tiled_depth(head_dim);
  const std::size_t columns = (head_dim + kRowsPerTile - 1) / kRowsPerTile * kRowsPerTile;
  return {.depth = depth,
          .columns = columns,
          .queries = kQueriesPerTileItem * depth / 2,
          .keys = kKeysPerBlock * depth / 2,
          .values = kKeysPerBlock * columns / 2,
          .weights = kMostRowsAtOnce * kKeysPerBlock / 2,
          .outs = kQueriesPerTileItem * columns,
          .rows = kRowsPerTile * depth,
          .scores = kMostRowsAtOnce * kKeysPerBlock};
}

#if defined(__x86_64__) || defined(_M_X64)
const TileOperations& tile_operations() {
  static const TileOperations best =
      is_supported(Isa::avx512vnni) ? tile_operations_avx512vnni() : tile_operations_avx2();
  return best;
}
#elif defined(__aarch64__) || defined(_M_ARM64)
const TileOperations& tile_operations() { return tile_operations_neon(); }
#endif

}  // namespace chunkrt
