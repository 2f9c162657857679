#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<BlockGemmFunction> block_gemm_f32_s8row_u4block_table() {
  static constexpr std::array rows = {
      KernelRow<BlockGemmFunction>{Isa::reference, "block_gemm_f32_s8row_u4block_reference",
                                   block_gemm_f32_s8row_u4block_reference},
  };
  return rows;
}

}  // namespace chunkrt
