// block_gemm by matrix tiles where no AMX is: the loops of kernels/block_gemm/tiles.h over plain values.
#pragma once

#include "kernels/block_gemm/block_gemm.h"

namespace chunkrt::testing {

// By the portable twin.
BlockGemmFunction block_gemm_by_tile_twin;

#if defined(__linux__) && defined(__x86_64__)
// By AMX's instructions, which the processor has or TileTraps catches.
BlockGemmFunction block_gemm_by_tile_instructions;
#endif

}  // namespace chunkrt::testing
