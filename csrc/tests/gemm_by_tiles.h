// gemm by matrix tiles on processors without AMX: the loops of kernels/gemm/tiles.h with another epilogue.
#pragma once

#include "kernels/gemm/gemm.h"

namespace chunkrt::testing {

// With the portable twin.
GemmFunction gemm_by_tile_twin;

#if defined(__linux__) && defined(__x86_64__)
// With AMX's instructions, which the processor has or TileTraps emulates.
GemmFunction gemm_by_tile_instructions;
#endif

}  // namespace chunkrt::testing
