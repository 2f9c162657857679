#include "kernels/gemm/tiles.h"
#include "tests/gemm_by_tiles.h"
#include "tests/plain_ends.h"
#include "tests/tile_twin.h"

namespace chunkrt::testing {

void gemm_by_tile_twin(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  multiply_by_tiles<TileTwin>(args, block_begin, block_end, store_plainly, multiply_few_rows);
}

}  // namespace chunkrt::testing
