#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<RmsNormFunction> rms_norm_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<RmsNormFunction>{Isa::avx512vnni, "rms_norm_f32_f32_avx512vnni",
                                 CHUNKRT_ON_X86(rms_norm_f32_f32_avx512vnni)},
      KernelRow<RmsNormFunction>{Isa::avx2, "rms_norm_f32_f32_avx2", CHUNKRT_ON_X86(rms_norm_f32_f32_avx2)},
      KernelRow<RmsNormFunction>{Isa::neon, "rms_norm_f32_f32_neon", CHUNKRT_ON_ARM(rms_norm_f32_f32_neon)},
      KernelRow<RmsNormFunction>{Isa::reference, "rms_norm_f32_f32_reference", rms_norm_f32_f32_reference},
  };
  return rows;
}

}  // namespace chunkrt
