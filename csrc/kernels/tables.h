// Every kernel's dispatch table. Each is defined in the dispatch.cc beside the kernel's files.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/block_gemm/block_gemm.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/float_linear/float_linear.h"
#include "kernels/gemm/gemm.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/norm/norm.h"
#include "kernels/outliers/outliers.h"
#include "kernels/quantize/quantize.h"
#include "kernels/shadow/shadow.h"

namespace chunkrt {

KernelTable<GemmFunction> gemm_f32_s8row_s8col_table();
KernelTable<BlockGemmFunction> block_gemm_f32_s8row_u4block_table();
KernelTable<QuantizeFunction> quantize_s8row_f32_table();
KernelTable<GridQuantizeFunction> quantize_s8grid_f32_table();
KernelTable<TakeOutliersFunction> take_outliers_f32_f32_table();
KernelTable<AddOutliersFunction> add_outliers_f32_s8col_table();
KernelTable<AddBlockOutliersFunction> add_outliers_f32_u4block_table();
KernelTable<FloatLinearFunction> float_linear_f32_f32_table();
KernelTable<RmsNormFunction> rms_norm_f32_f32_table();
KernelTable<BinaryFunction> add_f32_f32_f32_table();
KernelTable<BinaryFunction> mul_f32_f32_f32_table();
KernelTable<UnaryFunction> sigmoid_f32_f32_table();
KernelTable<UnaryFunction> exp_f32_f32_table();
KernelTable<UnaryFunction> gelu_f32_f32_table();
KernelTable<UnaryFunction> softplus_f32_f32_table();
KernelTable<UnaryFunction> tanh_f32_f32_table();
KernelTable<SiluMulFunction> silu_mul_f32_f32_f32_table();
KernelTable<GeluMulFunction> gelu_mul_f32_f32_f32_table();
KernelTable<RoundToGridFunction> round_to_grid_f32_f32_f32_table();
KernelTable<WidenFunction> widen_f32_f16_table();
KernelTable<FindOutliersFunction> find_outliers_f32_f32_table();
KernelTable<DequantizeRowFunction> dequantize_row_f32_s8col_table();
KernelTable<AddOuterProductFunction> add_outer_product_f32_f32_f32_table();
KernelTable<AttentionFunction> append_cache_f32_table();
KernelTable<AttentionFunction> attend_f32_f32_cache_table();
KernelTable<ConvolutionFunction> causal_convolution_f32_f32_table();
KernelTable<DeltaRuleFunction> gated_delta_rule_f32_f32_table();

}  // namespace chunkrt
