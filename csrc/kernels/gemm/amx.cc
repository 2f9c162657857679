// gemm with AMX: TDPBSSD multiplies 16 rows by 16 columns, 64 k deep, signed by signed, and adds up exactly.
// A few rows are left to VNNI: the same bits.
#include "kernels/gemm/store_avx512.h"
#include "kernels/gemm/tiles.h"
#include "kernels/list.h"
#include "kernels/tiles_amx.h"

namespace chunkrt {
namespace {

void store_sums(const GemmArgs& args, std::size_t row, std::size_t block, const std::int32_t* sums) {
  store_block(args, row, block, _mm512_load_si512(sums));
}

}  // namespace

void gemm_f32_s8row_s8col_amx(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  multiply_by_tiles<AmxTiles>(args, block_begin, block_end, store_sums, gemm_f32_s8row_s8col_avx512vnni);
}

}  // namespace chunkrt
