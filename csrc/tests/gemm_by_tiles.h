// gemm with matrix tiles on processors without AMX: the loops of kernels/gemm/tiles.h with a different
// epilogue.
#pragma once

#include "kernels/gemm/gemm.h"

namespace chunkrt::testing {

// Computes the product with the portable equivalent of tile instructions.
GemmFunction gemm_by_tile_twin;

#if defined(__linux__) && defined(__x86_64__)
// Computes the product with AMX instructions, which the processor supports or TileTraps emulates.
GemmFunction gemm_by_tile_instructions;
#endif

}  // namespace chunkrt::testing
