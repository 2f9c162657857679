// gemm by matrix tiles where no AMX is: the loops of kernels/gemm/tiles.h with other ends.
#pragma once

#include "kernels/gemm/gemm.h"

namespace chunkrt::testing {

// By the portable twin.
GemmFunction gemm_by_tile_twin;

#if defined(__linux__) && defined(__x86_64__)
// By AMX's instructions, which the processor has or TileTraps catches.
GemmFunction gemm_by_tile_instructions;
#endif

}  // namespace chunkrt::testing
