#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<FloatLinearFunction> float_linear_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<FloatLinearFunction>{Isa::avx512vnni, "float_linear_f32_f32_avx512vnni",
                                     CHUNKRT_ON_X86(float_linear_f32_f32_avx512vnni)},
      KernelRow<FloatLinearFunction>{Isa::avx2, "float_linear_f32_f32_avx2",
                                     CHUNKRT_ON_X86(float_linear_f32_f32_avx2)},
      KernelRow<FloatLinearFunction>{Isa::neon, "float_linear_f32_f32_neon",
                                     CHUNKRT_ON_ARM(float_linear_f32_f32_neon)},
      KernelRow<FloatLinearFunction>{Isa::reference, "float_linear_f32_f32_reference",
                                     float_linear_f32_f32_reference},
  };
  return rows;
}

}  // namespace chunkrt
