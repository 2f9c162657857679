#include <array>

#include "kernels/tables.h"

namespace chunkrt {

KernelTable<BinaryFunction> add_f32_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<BinaryFunction>{Isa::avx512vnni, "add_f32_f32_f32_avx512vnni",
                                CHUNKRT_ON_X86(add_f32_f32_f32_avx512vnni)},
      KernelRow<BinaryFunction>{Isa::avx2, "add_f32_f32_f32_avx2", CHUNKRT_ON_X86(add_f32_f32_f32_avx2)},
      KernelRow<BinaryFunction>{Isa::neon, "add_f32_f32_f32_neon", CHUNKRT_ON_ARM(add_f32_f32_f32_neon)},
      KernelRow<BinaryFunction>{Isa::reference, "add_f32_f32_f32_reference", add_f32_f32_f32_reference},
  };
  return rows;
}

KernelTable<BinaryFunction> mul_f32_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<BinaryFunction>{Isa::avx512vnni, "mul_f32_f32_f32_avx512vnni",
                                CHUNKRT_ON_X86(mul_f32_f32_f32_avx512vnni)},
      KernelRow<BinaryFunction>{Isa::avx2, "mul_f32_f32_f32_avx2", CHUNKRT_ON_X86(mul_f32_f32_f32_avx2)},
      KernelRow<BinaryFunction>{Isa::neon, "mul_f32_f32_f32_neon", CHUNKRT_ON_ARM(mul_f32_f32_f32_neon)},
      KernelRow<BinaryFunction>{Isa::reference, "mul_f32_f32_f32_reference", mul_f32_f32_f32_reference},
  };
  return rows;
}

KernelTable<UnaryFunction> sigmoid_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<UnaryFunction>{Isa::avx512vnni, "sigmoid_f32_f32_avx512vnni",
                               CHUNKRT_ON_X86(sigmoid_f32_f32_avx512vnni)},
      KernelRow<UnaryFunction>{Isa::avx2, "sigmoid_f32_f32_avx2", CHUNKRT_ON_X86(sigmoid_f32_f32_avx2)},
      KernelRow<UnaryFunction>{Isa::neon, "sigmoid_f32_f32_neon", CHUNKRT_ON_ARM(sigmoid_f32_f32_neon)},
      KernelRow<UnaryFunction>{Isa::reference, "sigmoid_f32_f32_reference", sigmoid_f32_f32_reference},
  };
  return rows;
}

KernelTable<UnaryFunction> exp_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<UnaryFunction>{Isa::avx512vnni, "exp_f32_f32_avx512vnni",
                               CHUNKRT_ON_X86(exp_f32_f32_avx512vnni)},
      KernelRow<UnaryFunction>{Isa::avx2, "exp_f32_f32_avx2", CHUNKRT_ON_X86(exp_f32_f32_avx2)},
      KernelRow<UnaryFunction>{Isa::neon, "exp_f32_f32_neon", CHUNKRT_ON_ARM(exp_f32_f32_neon)},
      KernelRow<UnaryFunction>{Isa::reference, "exp_f32_f32_reference", exp_f32_f32_reference},
  };
  return rows;
}

KernelTable<UnaryFunction> gelu_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<UnaryFunction>{Isa::avx512vnni, "gelu_f32_f32_avx512vnni",
                               CHUNKRT_ON_X86(gelu_f32_f32_avx512vnni)},
      KernelRow<UnaryFunction>{Isa::avx2, "gelu_f32_f32_avx2", CHUNKRT_ON_X86(gelu_f32_f32_avx2)},
      KernelRow<UnaryFunction>{Isa::neon, "gelu_f32_f32_neon", CHUNKRT_ON_ARM(gelu_f32_f32_neon)},
      KernelRow<UnaryFunction>{Isa::reference, "gelu_f32_f32_reference", gelu_f32_f32_reference},
  };
  return rows;
}

KernelTable<UnaryFunction> softplus_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<UnaryFunction>{Isa::avx512vnni, "softplus_f32_f32_avx512vnni",
                               CHUNKRT_ON_X86(softplus_f32_f32_avx512vnni)},
      KernelRow<UnaryFunction>{Isa::avx2, "softplus_f32_f32_avx2", CHUNKRT_ON_X86(softplus_f32_f32_avx2)},
      KernelRow<UnaryFunction>{Isa::neon, "softplus_f32_f32_neon", CHUNKRT_ON_ARM(softplus_f32_f32_neon)},
      KernelRow<UnaryFunction>{Isa::reference, "softplus_f32_f32_reference", softplus_f32_f32_reference},
  };
  return rows;
}

KernelTable<UnaryFunction> tanh_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<UnaryFunction>{Isa::avx512vnni, "tanh_f32_f32_avx512vnni",
                               CHUNKRT_ON_X86(tanh_f32_f32_avx512vnni)},
      KernelRow<UnaryFunction>{Isa::avx2, "tanh_f32_f32_avx2", CHUNKRT_ON_X86(tanh_f32_f32_avx2)},
      KernelRow<UnaryFunction>{Isa::neon, "tanh_f32_f32_neon", CHUNKRT_ON_ARM(tanh_f32_f32_neon)},
      KernelRow<UnaryFunction>{Isa::reference, "tanh_f32_f32_reference", tanh_f32_f32_reference},
  };
  return rows;
}

KernelTable<SiluMulFunction> silu_mul_f32_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<SiluMulFunction>{Isa::avx512vnni, "silu_mul_f32_f32_f32_avx512vnni",
                                 CHUNKRT_ON_X86(silu_mul_f32_f32_f32_avx512vnni)},
      KernelRow<SiluMulFunction>{Isa::avx2, "silu_mul_f32_f32_f32_avx2",
                                 CHUNKRT_ON_X86(silu_mul_f32_f32_f32_avx2)},
      KernelRow<SiluMulFunction>{Isa::neon, "silu_mul_f32_f32_f32_neon",
                                 CHUNKRT_ON_ARM(silu_mul_f32_f32_f32_neon)},
      KernelRow<SiluMulFunction>{Isa::reference, "silu_mul_f32_f32_f32_reference",
                                 silu_mul_f32_f32_f32_reference},
  };
  return rows;
}

KernelTable<GeluMulFunction> gelu_mul_f32_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<GeluMulFunction>{Isa::avx512vnni, "gelu_mul_f32_f32_f32_avx512vnni",
                                 CHUNKRT_ON_X86(gelu_mul_f32_f32_f32_avx512vnni)},
      KernelRow<GeluMulFunction>{Isa::avx2, "gelu_mul_f32_f32_f32_avx2",
                                 CHUNKRT_ON_X86(gelu_mul_f32_f32_f32_avx2)},
      KernelRow<GeluMulFunction>{Isa::neon, "gelu_mul_f32_f32_f32_neon",
                                 CHUNKRT_ON_ARM(gelu_mul_f32_f32_f32_neon)},
      KernelRow<GeluMulFunction>{Isa::reference, "gelu_mul_f32_f32_f32_reference",
                                 gelu_mul_f32_f32_f32_reference},
  };
  return rows;
}

KernelTable<RoundToGridFunction> round_to_grid_f32_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<RoundToGridFunction>{Isa::avx512vnni, "round_to_grid_f32_f32_f32_avx512vnni",
                                     CHUNKRT_ON_X86(round_to_grid_f32_f32_f32_avx512vnni)},
      KernelRow<RoundToGridFunction>{Isa::avx2, "round_to_grid_f32_f32_f32_avx2",
                                     CHUNKRT_ON_X86(round_to_grid_f32_f32_f32_avx2)},
      KernelRow<RoundToGridFunction>{Isa::neon, "round_to_grid_f32_f32_f32_neon",
                                     CHUNKRT_ON_ARM(round_to_grid_f32_f32_f32_neon)},
      KernelRow<RoundToGridFunction>{Isa::reference, "round_to_grid_f32_f32_f32_reference",
                                     round_to_grid_f32_f32_f32_reference},
  };
  return rows;
}

KernelTable<WidenFunction> widen_f32_f16_table() {
  static constexpr std::array rows = {
      KernelRow<WidenFunction>{Isa::avx512vnni, "widen_f32_f16_avx512vnni",
                               CHUNKRT_ON_X86(widen_f32_f16_avx512vnni)},
      KernelRow<WidenFunction>{Isa::avx2, "widen_f32_f16_avx2", CHUNKRT_ON_X86(widen_f32_f16_avx2)},
      KernelRow<WidenFunction>{Isa::neon, "widen_f32_f16_neon", CHUNKRT_ON_ARM(widen_f32_f16_neon)},
      KernelRow<WidenFunction>{Isa::reference, "widen_f32_f16_reference", widen_f32_f16_reference},
  };
  return rows;
}

}  // namespace chunkrt
