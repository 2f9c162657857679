// attention in bfloat16 with AMX: TDPBF16PS multiplies 16 rows by 16 columns, 32 deep. What lies around the
// products is AVX-512's where the processor has it, else AVX2's, as where tile instructions are emulated.
#include "kernels/attention/tiles.h"
#include "kernels/list.h"
#include "kernels/tiles_amx.h"

namespace chunkrt {

void attend_f32_bf16_cache_amx_bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                    float* scratch) {
  attend_by_tiles<AmxBfloatTiles>(args, begin, end, scratch, tile_operations());
}

}  // namespace chunkrt
