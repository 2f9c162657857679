#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<GemmFunction> gemm_f32_s8row_s8col_table() {
  static constexpr std::array rows = {
      KernelRow<GemmFunction>{Isa::avx512vnni, "gemm_f32_s8row_s8col_avx512vnni",
                              CHUNKRT_ON_X86(gemm_f32_s8row_s8col_avx512vnni)},
      KernelRow<GemmFunction>{Isa::avxvnni, "gemm_f32_s8row_s8col_avxvnni",
                              CHUNKRT_ON_X86(gemm_f32_s8row_s8col_avxvnni)},
      KernelRow<GemmFunction>{Isa::avx2, "gemm_f32_s8row_s8col_avx2",
                              CHUNKRT_ON_X86(gemm_f32_s8row_s8col_avx2)},
      KernelRow<GemmFunction>{Isa::neon_i8mm, "gemm_f32_s8row_s8col_neon_i8mm",
                              CHUNKRT_ON_ARM(gemm_f32_s8row_s8col_neon_i8mm)},
      KernelRow<GemmFunction>{Isa::neon_dotprod, "gemm_f32_s8row_s8col_neon_dotprod",
                              CHUNKRT_ON_ARM(gemm_f32_s8row_s8col_neon_dotprod)},
      KernelRow<GemmFunction>{Isa::reference, "gemm_f32_s8row_s8col_reference",
                              gemm_f32_s8row_s8col_reference},
  };
  return rows;
}

}  // namespace chunkrt
