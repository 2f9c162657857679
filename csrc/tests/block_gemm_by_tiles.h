// block_gemm with matrix tiles on processors without AMX: the loops of kernels/block_gemm/tiles.h over plain
// values.
#pragma once

#include "kernels/block_gemm/block_gemm.h"

namespace chunkrt::testing {

// Computes the product with the portable equivalent of tile instructions.
BlockGemmFunction block_gemm_by_tile_twin;

#if defined(__linux__) && defined(__x86_64__)
// Computes the product with AMX instructions, which the processor supports or TileTraps emulates.
BlockGemmFunction block_gemm_by_tile_instructions;
#endif

}  // namespace chunkrt::testing
