#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<BlockGemmFunction> block_gemm_f32_s8row_u4block_table() {
  static constexpr std::array rows = {
      KernelRow<BlockGemmFunction>{Isa::neon_i8mm, "block_gemm_f32_s8row_u4block_neon_i8mm",
                                   CHUNKRT_ON_ARM(block_gemm_f32_s8row_u4block_neon_i8mm)},
      KernelRow<BlockGemmFunction>{Isa::neon_dotprod, "block_gemm_f32_s8row_u4block_neon_dotprod",
                                   CHUNKRT_ON_ARM(block_gemm_f32_s8row_u4block_neon_dotprod)},
      KernelRow<BlockGemmFunction>{Isa::reference, "block_gemm_f32_s8row_u4block_reference",
                                   block_gemm_f32_s8row_u4block_reference},
  };
  return rows;
}

}  // namespace chunkrt
