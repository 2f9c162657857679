#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<FindOutliersFunction> find_outliers_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<FindOutliersFunction>{Isa::avx512vnni, "find_outliers_f32_f32_avx512vnni",
                                      CHUNKRT_ON_X86(find_outliers_f32_f32_avx512vnni)},
      KernelRow<FindOutliersFunction>{Isa::avx2, "find_outliers_f32_f32_avx2",
                                      CHUNKRT_ON_X86(find_outliers_f32_f32_avx2)},
      KernelRow<FindOutliersFunction>{Isa::neon, "find_outliers_f32_f32_neon",
                                      CHUNKRT_ON_ARM(find_outliers_f32_f32_neon)},
      KernelRow<FindOutliersFunction>{Isa::reference, "find_outliers_f32_f32_reference",
                                      find_outliers_f32_f32_reference},
  };
  return rows;
}

KernelTable<DequantizeRowFunction> dequantize_row_f32_s8col_table() {
  static constexpr std::array rows = {
      KernelRow<DequantizeRowFunction>{Isa::avx512vnni, "dequantize_row_f32_s8col_avx512vnni",
                                       CHUNKRT_ON_X86(dequantize_row_f32_s8col_avx512vnni)},
      KernelRow<DequantizeRowFunction>{Isa::avx2, "dequantize_row_f32_s8col_avx2",
                                       CHUNKRT_ON_X86(dequantize_row_f32_s8col_avx2)},
      KernelRow<DequantizeRowFunction>{Isa::neon, "dequantize_row_f32_s8col_neon",
                                       CHUNKRT_ON_ARM(dequantize_row_f32_s8col_neon)},
      KernelRow<DequantizeRowFunction>{Isa::reference, "dequantize_row_f32_s8col_reference",
                                       dequantize_row_f32_s8col_reference},
  };
  return rows;
}

KernelTable<AddOuterProductFunction> add_outer_product_f32_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<AddOuterProductFunction>{Isa::avx512vnni, "add_outer_product_f32_f32_f32_avx512vnni",
                                         CHUNKRT_ON_X86(add_outer_product_f32_f32_f32_avx512vnni)},
      KernelRow<AddOuterProductFunction>{Isa::avx2, "add_outer_product_f32_f32_f32_avx2",
                                         CHUNKRT_ON_X86(add_outer_product_f32_f32_f32_avx2)},
      KernelRow<AddOuterProductFunction>{Isa::neon, "add_outer_product_f32_f32_f32_neon",
                                         CHUNKRT_ON_ARM(add_outer_product_f32_f32_f32_neon)},
      KernelRow<AddOuterProductFunction>{Isa::reference, "add_outer_product_f32_f32_f32_reference",
                                         add_outer_product_f32_f32_f32_reference},
  };
  return rows;
}

}  // namespace chunkrt
