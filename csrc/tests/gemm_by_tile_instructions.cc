#include "kernels/gemm/tiles.h"
#include "kernels/tiles_amx.h"
#include "tests/gemm_by_tiles.h"
#include "tests/plain_ends.h"
#include "tests/tile_traps.h"

namespace chunkrt::testing {

void gemm_by_tile_instructions(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  const TileTraps traps;
  multiply_by_tiles<AmxTiles>(args, block_begin, block_end, store_plainly, multiply_few_rows);
}

}  // namespace chunkrt::testing
