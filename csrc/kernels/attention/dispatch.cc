#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<AttentionFunction> append_cache_f32_table() {
  static constexpr std::array rows = {
      KernelRow<AttentionFunction>{Isa::avx512vnni, "append_cache_f32_avx512vnni",
                                   CHUNKRT_ON_X86(append_cache_f32_avx512vnni)},
      KernelRow<AttentionFunction>{Isa::avx2, "append_cache_f32_avx2", CHUNKRT_ON_X86(append_cache_f32_avx2)},
      KernelRow<AttentionFunction>{Isa::neon, "append_cache_f32_neon", CHUNKRT_ON_ARM(append_cache_f32_neon)},
      KernelRow<AttentionFunction>{Isa::reference, "append_cache_f32_reference", append_cache_f32_reference},
  };
  return rows;
}

KernelTable<AttentionFunction> attend_f32_f32_cache_table() {
  static constexpr std::array rows = {
      KernelRow<AttentionFunction>{Isa::avx512vnni, "attend_f32_f32_cache_avx512vnni",
                                   CHUNKRT_ON_X86(attend_f32_f32_cache_avx512vnni)},
      KernelRow<AttentionFunction>{Isa::avx2, "attend_f32_f32_cache_avx2",
                                   CHUNKRT_ON_X86(attend_f32_f32_cache_avx2)},
      KernelRow<AttentionFunction>{Isa::neon, "attend_f32_f32_cache_neon",
                                   CHUNKRT_ON_ARM(attend_f32_f32_cache_neon)},
      KernelRow<AttentionFunction>{Isa::reference, "attend_f32_f32_cache_reference",
                                   attend_f32_f32_cache_reference},
  };
  return rows;
}

}  // namespace chunkrt
