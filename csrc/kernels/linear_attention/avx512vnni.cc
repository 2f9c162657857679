// linear_attention with AVX-512.
#include "kernels/linear_attention/loops.h"

namespace chunkrt {

void causal_convolution_f32_f32_avx512vnni(const ConvolutionArgs& args, std::size_t begin, std::size_t end,
                                           float* scratch) {
  convolve(args, begin, end, scratch);
}

void gated_delta_rule_f32_f32_avx512vnni(const DeltaRuleArgs& args, std::size_t begin, std::size_t end,
                                         float* scratch) {
  advance_heads(args, begin, end, scratch);
}

}  // namespace chunkrt
