// block_gemm by matrix tiles on processors without AMX: the loops of kernels/block_gemm/tiles.h over plain
// values.
#pragma once

#include "kernels/block_gemm/block_gemm.h"

namespace chunkrt::testing {

// With the portable twin.
BlockGemmFunction block_gemm_by_tile_twin;

#if defined(__linux__) && defined(__x86_64__)
// With AMX's instructions, which the processor has or TileTraps emulates.
BlockGemmFunction block_gemm_by_tile_instructions;
#endif

}  // namespace chunkrt::testing
