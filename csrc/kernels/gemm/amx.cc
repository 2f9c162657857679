// gemm with AMX: TDPBSSD multiplies 16 rows by 16 columns over 64 values along k, signed by signed, with
// exact sums. If the call has few rows, VNNI computes them, with identical results.
#include "kernels/gemm/tiles.h"
#include "kernels/list.h"
#include "kernels/store_avx512.h"
#include "kernels/tiles_amx.h"

namespace chunkrt {
namespace {

void store_block(const GemmArgs& args, std::size_t row, std::size_t block, const std::int32_t* sums) {
  const __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
  store_columns(args, row, block * kGemmColumnsPerBlock, value, args.right_scales);
}

}  // namespace

void gemm_f32_s8row_s8col_amx(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  multiply_by_tiles<AmxTiles>(args, block_begin, block_end, store_block, gemm_f32_s8row_s8col_avx512vnni);
}

}  // namespace chunkrt
