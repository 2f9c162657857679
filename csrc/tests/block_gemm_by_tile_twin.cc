#include "tests/block_gemm_by_tiles.h"
#include "tests/plain_values.h"
#include "tests/tile_twin.h"

namespace chunkrt::testing {

void block_gemm_by_tile_twin(const BlockGemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  multiply_by_tiles<TileTwin, PlainValues>(args, block_begin, block_end,
                                           block_gemm_f32_s8row_u4block_reference);
}

}  // namespace chunkrt::testing
