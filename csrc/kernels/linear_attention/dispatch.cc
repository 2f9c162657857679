#include <array>

#include "kernels/tables.h"

namespace chunkrt {

std::size_t convolution_items(std::size_t channels) {
  return (channels + kChannelsPerItem - 1) / kChannelsPerItem;
}

std::size_t convolution_scratch_floats(std::size_t taps) { return (2 * taps + 1) * kChannelsPerItem; }

std::size_t delta_rule_scratch_floats(std::size_t k_dim, std::size_t v_dim) {
  return kDeltaRows * (3 * k_dim + 2 * kDeltaRows + 2 * v_dim);
}

KernelTable<ConvolutionFunction> causal_convolution_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<ConvolutionFunction>{Isa::avx512vnni, "causal_convolution_f32_f32_avx512vnni",
                                     CHUNKRT_ON_X86(causal_convolution_f32_f32_avx512vnni)},
      KernelRow<ConvolutionFunction>{Isa::avx2, "causal_convolution_f32_f32_avx2",
                                     CHUNKRT_ON_X86(causal_convolution_f32_f32_avx2)},
      KernelRow<ConvolutionFunction>{Isa::neon, "causal_convolution_f32_f32_neon",
                                     CHUNKRT_ON_ARM(causal_convolution_f32_f32_neon)},
      KernelRow<ConvolutionFunction>{Isa::reference, "causal_convolution_f32_f32_reference",
                                     causal_convolution_f32_f32_reference},
  };
  return rows;
}

KernelTable<DeltaRuleFunction> gated_delta_rule_f32_f32_table() {
  static constexpr std::array rows = {
      KernelRow<DeltaRuleFunction>{Isa::avx512vnni, "gated_delta_rule_f32_f32_avx512vnni",
                                   CHUNKRT_ON_X86(gated_delta_rule_f32_f32_avx512vnni)},
      KernelRow<DeltaRuleFunction>{Isa::avx2, "gated_delta_rule_f32_f32_avx2",
                                   CHUNKRT_ON_X86(gated_delta_rule_f32_f32_avx2)},
      KernelRow<DeltaRuleFunction>{Isa::neon, "gated_delta_rule_f32_f32_neon",
                                   CHUNKRT_ON_ARM(gated_delta_rule_f32_f32_neon)},
      KernelRow<DeltaRuleFunction>{Isa::reference, "gated_delta_rule_f32_f32_reference",
                                   gated_delta_rule_f32_f32_reference},
  };
  return rows;
}

}  // namespace chunkrt
