// What was built, what this processor has, and what is selected.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings/parts.h"
#include "kernels/tables.h"

namespace py = pybind11;

namespace chunkrt {
namespace {

std::map<std::string, bool> isas(bool (*holds)(Isa)) {
  std::map<std::string, bool> answers;
  for (const Isa isa : kAllIsas) answers[std::string(name_of(isa))] = holds(isa);
  return answers;
}

std::map<std::string, std::string> selected_kernels() {
  std::map<std::string, std::string> selected;
  const auto add = [&selected](const char* kernel, const auto& table) {
    selected[kernel] = name_of(select_kernel(table).isa);
  };
  add("gemm_f32_s8row_s8col", gemm_f32_s8row_s8col_table());
  add("block_gemm_f32_s8row_u4block", block_gemm_f32_s8row_u4block_table());
  add("quantize_s8row_f32", quantize_s8row_f32_table());
  add("quantize_s8grid_f32", quantize_s8grid_f32_table());
  add("rms_norm_f32_f32", rms_norm_f32_f32_table());
  add("add_f32_f32_f32", add_f32_f32_f32_table());
  add("mul_f32_f32_f32", mul_f32_f32_f32_table());
  add("sigmoid_f32_f32", sigmoid_f32_f32_table());
  add("exp_f32_f32", exp_f32_f32_table());
  add("gelu_f32_f32", gelu_f32_f32_table());
  add("softplus_f32_f32", softplus_f32_f32_table());
  add("tanh_f32_f32", tanh_f32_f32_table());
  add("silu_mul_f32_f32_f32", silu_mul_f32_f32_f32_table());
  add("gelu_mul_f32_f32_f32", gelu_mul_f32_f32_f32_table());
  add("round_to_grid_f32_f32_f32", round_to_grid_f32_f32_f32_table());
  add("widen_f32_f16", widen_f32_f16_table());
  add("float_linear_f32_f32", float_linear_f32_f32_table());
  add("take_outliers_f32_f32", take_outliers_f32_f32_table());
  add("add_outliers_f32_s8col", add_outliers_f32_s8col_table());
  add("add_outliers_f32_u4block", add_outliers_f32_u4block_table());
  add("find_outliers_f32_f32", find_outliers_f32_f32_table());
  add("dequantize_row_f32_s8col", dequantize_row_f32_s8col_table());
  add("add_outer_product_f32_f32_f32", add_outer_product_f32_f32_f32_table());
  add("append_cache_f32", append_cache_f32_table());
  add("attend_f32_f32_cache", attend_f32_f32_cache_table());
  add("causal_convolution_f32_f32", causal_convolution_f32_f32_table());
  add("gated_delta_rule_f32_f32", gated_delta_rule_f32_f32_table());
  return selected;
}

}  // namespace

void bind_cpu(py::module_& module) {
  module.def(
      "architecture", [] { return std::string(architecture()); }, "What this module was compiled for.");
  module.def(
      "built_isas", [] { return isas(is_built); }, "By name: whether kernels for it are in this module.");
  module.def("supported_isas", [] { return isas(is_supported); }, "By name: whether this processor has it.");
  module.def("selected_kernels", selected_kernels,
             "By kernel: the instruction set chosen, under CHUNKRT_FORCE_ISA if that is set.");
}

}  // namespace chunkrt
