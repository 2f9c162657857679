// attention in bfloat16 with AMX: TDPBF16PS multiplies 16 rows by 16 columns at a depth of 32. The operations
// around the products use AVX-512 if the processor supports it, otherwise AVX2 (for example, when tile
// instructions are emulated).
#include "kernels/attention/tile_products.h"
#include "kernels/attention/tiles.h"
#include "kernels/list.h"
#include "kernels/tiles_amx.h"

namespace chunkrt {

void attend_f32_bf16_cache_amx_bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                    float* scratch) {
  attend_in_bfloat<TileProducts<AmxBfloatTiles>>(args, begin, end, scratch, tile_operations());
}

}  // namespace chunkrt
