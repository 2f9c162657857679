#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<TakeOutliersFunction> take_outliers_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<TakeOutliersFunction>{Isa::avx512vnni, "take_outliers_f32_f32_avx512vnni",
                                      CHUNKRT_ON_X86(take_outliers_f32_f32_avx512vnni)},
      KernelRow<TakeOutliersFunction>{Isa::avx2, "take_outliers_f32_f32_avx2",
                                      CHUNKRT_ON_X86(take_outliers_f32_f32_avx2)},
      KernelRow<TakeOutliersFunction>{Isa::neon, "take_outliers_f32_f32_neon",
                                      CHUNKRT_ON_ARM(take_outliers_f32_f32_neon)},
      KernelRow<TakeOutliersFunction>{Isa::reference, "take_outliers_f32_f32_reference",
                                      take_outliers_f32_f32_reference},
  };
  return rows;
}

KernelTable<AddOutliersFunction> add_outliers_f32_s8col_table() {
  static constexpr std::array rows = {
      KernelRow<AddOutliersFunction>{Isa::avx512vnni, "add_outliers_f32_s8col_avx512vnni",
                                     CHUNKRT_ON_X86(add_outliers_f32_s8col_avx512vnni)},
      KernelRow<AddOutliersFunction>{Isa::avx2, "add_outliers_f32_s8col_avx2",
                                     CHUNKRT_ON_X86(add_outliers_f32_s8col_avx2)},
      KernelRow<AddOutliersFunction>{Isa::neon, "add_outliers_f32_s8col_neon",
                                     CHUNKRT_ON_ARM(add_outliers_f32_s8col_neon)},
      KernelRow<AddOutliersFunction>{Isa::reference, "add_outliers_f32_s8col_reference",
                                     add_outliers_f32_s8col_reference},
  };
  return rows;
}

KernelTable<AddBlockOutliersFunction> add_outliers_f32_u4block_table() {
  static constexpr std::array rows = {
      KernelRow<AddBlockOutliersFunction>{Isa::avx512vnni, "add_outliers_f32_u4block_avx512vnni",
                                          CHUNKRT_ON_X86(add_outliers_f32_u4block_avx512vnni)},
      KernelRow<AddBlockOutliersFunction>{Isa::avx2, "add_outliers_f32_u4block_avx2",
                                          CHUNKRT_ON_X86(add_outliers_f32_u4block_avx2)},
      KernelRow<AddBlockOutliersFunction>{Isa::neon, "add_outliers_f32_u4block_neon",
                                          CHUNKRT_ON_ARM(add_outliers_f32_u4block_neon)},
      KernelRow<AddBlockOutliersFunction>{Isa::reference, "add_outliers_f32_u4block_reference",
                                          add_outliers_f32_u4block_reference},
  };
  return rows;
}

}  // namespace chunkrt
