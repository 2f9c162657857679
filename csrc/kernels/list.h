// The list of all kernels, without inline functions, so that files for an instruction set may include it.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/block_gemm/block_gemm.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/float_linear/float_linear.h"
#include "kernels/gemm/gemm.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/low_rank/low_rank.h"
#include "kernels/norm/norm.h"
#include "kernels/outliers/outliers.h"
#include "kernels/quantize/quantize.h"
#include "kernels/shadow/shadow.h"
#include "kernels/unpack/unpack.h"

#if defined(__x86_64__) || defined(_M_X64)
#define CHUNKRT_ON_X86(...) __VA_ARGS__
#else
#define CHUNKRT_ON_X86(...)
#endif

#if defined(__x86_64__) && defined(__linux__)
#define CHUNKRT_WITH_TILES(...) __VA_ARGS__
#else
#define CHUNKRT_WITH_TILES(...)
#endif

#if defined(__aarch64__) || defined(_M_ARM64)
#define CHUNKRT_ON_ARM(...) __VA_ARGS__
#else
#define CHUNKRT_ON_ARM(...)
#endif

#if defined(__aarch64__)  // not MSVC, which lacks the intrinsics
#define CHUNKRT_WITH_ARM_BFLOAT(...) __VA_ARGS__
#else
#define CHUNKRT_WITH_ARM_BFLOAT(...)
#endif

// The built instruction sets for which a kernel has files: best first, the portable one last.
#define CHUNKRT_VECTORS(ROW, name, Function)                                \
  CHUNKRT_ON_X86(ROW(name, Function, avx512vnni) ROW(name, Function, avx2)) \
  CHUNKRT_ON_ARM(ROW(name, Function, neon))                                 \
  ROW(name, Function, reference)
#define CHUNKRT_DOT_PRODUCTS(ROW, name, Function)                                                        \
  CHUNKRT_ON_X86(ROW(name, Function, avx512vnni) ROW(name, Function, avxvnni) ROW(name, Function, avx2)) \
  CHUNKRT_ON_ARM(ROW(name, Function, neon_i8mm) ROW(name, Function, neon_dotprod))                       \
  ROW(name, Function, reference)
#define CHUNKRT_TILES(ROW, name, Function) \
  CHUNKRT_WITH_TILES(ROW(name, Function, amx)) CHUNKRT_DOT_PRODUCTS(ROW, name, Function)
#define CHUNKRT_BFLOAT_PRODUCTS(ROW, name, Function)      \
  CHUNKRT_WITH_TILES(ROW(name, Function, amx_bf16))       \
  CHUNKRT_ON_X86(ROW(name, Function, avx512bf16))         \
  CHUNKRT_WITH_ARM_BFLOAT(ROW(name, Function, neon_bf16)) \
  CHUNKRT_VECTORS(ROW, name, Function)

#define CHUNKRT_BYTE_SCORES(ROW, name, Function)          \
  CHUNKRT_ON_X86(ROW(name, Function, avx512bf16))         \
  CHUNKRT_WITH_ARM_BFLOAT(ROW(name, Function, neon_bf16)) \
  CHUNKRT_VECTORS(ROW, name, Function)

// A kernel's name, the type of its function and its instruction sets. The function in the file of an
// instruction set is named `name_isa`; the header that declares the function's type describes the kernel.
#define CHUNKRT_KERNELS(KERNEL)                                                   \
  KERNEL(gemm_f32_s8row_s8col, GemmFunction, CHUNKRT_TILES)                       \
  KERNEL(block_gemm_f32_s8row_u4block, BlockGemmFunction, CHUNKRT_TILES)          \
  KERNEL(unpack_s8col_u4block, UnpackFunction, CHUNKRT_VECTORS)                   \
  KERNEL(quantize_s8row_f32, QuantizeFunction, CHUNKRT_VECTORS)                   \
  KERNEL(quantize_s8grid_f32, GridQuantizeFunction, CHUNKRT_VECTORS)              \
  KERNEL(take_outliers_f32_f32, TakeOutliersFunction, CHUNKRT_VECTORS)            \
  KERNEL(add_outliers_f32_s8col, AddOutliersFunction, CHUNKRT_VECTORS)            \
  KERNEL(add_outliers_f32_u4block, AddBlockOutliersFunction, CHUNKRT_VECTORS)     \
  KERNEL(float_linear_f32_f32, FloatLinearFunction, CHUNKRT_VECTORS)              \
  KERNEL(low_rank_down_f32_f32, LowRankDownFunction, CHUNKRT_VECTORS)             \
  KERNEL(low_rank_up_f32_f32, LowRankUpFunction, CHUNKRT_VECTORS)                 \
  KERNEL(find_outliers_f32_f32, FindOutliersFunction, CHUNKRT_VECTORS)            \
  KERNEL(dequantize_row_f32_s8col, DequantizeRowFunction, CHUNKRT_VECTORS)        \
  KERNEL(add_outer_product_f32_f32_f32, AddOuterProductFunction, CHUNKRT_VECTORS) \
  KERNEL(rms_norm_f32_f32, RmsNormFunction, CHUNKRT_VECTORS)                      \
  KERNEL(layer_norm_f32_f32, LayerNormFunction, CHUNKRT_VECTORS)                  \
  KERNEL(add_f32_f32_f32, BinaryFunction, CHUNKRT_VECTORS)                        \
  KERNEL(mul_f32_f32_f32, BinaryFunction, CHUNKRT_VECTORS)                        \
  KERNEL(sigmoid_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                         \
  KERNEL(exp_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                             \
  KERNEL(gelu_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                            \
  KERNEL(erf_gelu_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                        \
  KERNEL(quick_gelu_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                      \
  KERNEL(xielu_f32_f32, XieluFunction, CHUNKRT_VECTORS)                           \
  KERNEL(relu_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                            \
  KERNEL(thresholded_relu_f32_f32, ThresholdFunction, CHUNKRT_VECTORS)            \
  KERNEL(softplus_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                        \
  KERNEL(tanh_f32_f32, UnaryFunction, CHUNKRT_VECTORS)                            \
  KERNEL(silu_mul_f32_f32_f32, BinaryFunction, CHUNKRT_VECTORS)                   \
  KERNEL(gelu_mul_f32_f32_f32, BinaryFunction, CHUNKRT_VECTORS)                   \
  KERNEL(clamped_swiglu_f32_f32_f32, ClampedSwigluFunction, CHUNKRT_VECTORS)      \
  KERNEL(round_to_grid_f32_f32_f32, RoundToGridFunction, CHUNKRT_VECTORS)         \
  KERNEL(widen_f32_f16, WidenFunction, CHUNKRT_VECTORS)                           \
  KERNEL(append_cache_f32, AttentionFunction, CHUNKRT_VECTORS)                    \
  KERNEL(attend_f32_f32_cache, AttentionFunction, CHUNKRT_VECTORS)                \
  KERNEL(attend_f32_bf16_cache, AttentionFunction, CHUNKRT_BFLOAT_PRODUCTS)       \
  KERNEL(attend_f32_s8_bf16_cache, AttentionFunction, CHUNKRT_BYTE_SCORES)        \
  KERNEL(causal_convolution_f32_f32, ConvolutionFunction, CHUNKRT_VECTORS)        \
  KERNEL(gated_delta_rule_f32_f32, DeltaRuleFunction, CHUNKRT_VECTORS)            \
  KERNEL(state_space_f32_f32, StateSpaceFunction, CHUNKRT_VECTORS)                \
  KERNEL(selective_scan_f32_f32, SelectiveScanFunction, CHUNKRT_VECTORS)

namespace chunkrt {

#define CHUNKRT_DECLARE(name, Function, isa) Function name##_##isa;
#define CHUNKRT_DECLARE_KERNEL(name, Function, ISAS) ISAS(CHUNKRT_DECLARE, name, Function)
CHUNKRT_KERNELS(CHUNKRT_DECLARE_KERNEL)
#undef CHUNKRT_DECLARE_KERNEL
#undef CHUNKRT_DECLARE

}  // namespace chunkrt
