#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<QuantizeFunction> quantize_s8row_f32_table() {
  static constexpr std::array rows = {
      KernelRow<QuantizeFunction>{Isa::avx512vnni, "quantize_s8row_f32_avx512vnni",
                                  CHUNKRT_ON_X86(quantize_s8row_f32_avx512vnni)},
      KernelRow<QuantizeFunction>{Isa::avx2, "quantize_s8row_f32_avx2",
                                  CHUNKRT_ON_X86(quantize_s8row_f32_avx2)},
      KernelRow<QuantizeFunction>{Isa::neon, "quantize_s8row_f32_neon",
                                  CHUNKRT_ON_ARM(quantize_s8row_f32_neon)},
      KernelRow<QuantizeFunction>{Isa::reference, "quantize_s8row_f32_reference",
                                  quantize_s8row_f32_reference},
  };
  return rows;
}

KernelTable<GridQuantizeFunction> quantize_s8grid_f32_table() {
  static constexpr std::array rows = {
      KernelRow<GridQuantizeFunction>{Isa::avx512vnni, "quantize_s8grid_f32_avx512vnni",
                                      CHUNKRT_ON_X86(quantize_s8grid_f32_avx512vnni)},
      KernelRow<GridQuantizeFunction>{Isa::avx2, "quantize_s8grid_f32_avx2",
                                      CHUNKRT_ON_X86(quantize_s8grid_f32_avx2)},
      KernelRow<GridQuantizeFunction>{Isa::neon, "quantize_s8grid_f32_neon",
                                      CHUNKRT_ON_ARM(quantize_s8grid_f32_neon)},
      KernelRow<GridQuantizeFunction>{Isa::reference, "quantize_s8grid_f32_reference",
                                      quantize_s8grid_f32_reference},
  };
  return rows;
}

}  // namespace chunkrt
