// The kernels themselves, each by instruction set: for tests and micro-benchmarks. Shapes are checked here.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/parts.h"
#include "kernels/dispatch.h"

namespace py = pybind11;
using namespace py::literals;

namespace chunkrt {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

template <typename T>
std::size_t size(const Array<T>& array, int axis) {
  return static_cast<std::size_t>(array.shape(axis));
}

template <typename T>
bool has_shape(const Array<T>& array, std::initializer_list<std::size_t> shape) {
  if (array.ndim() != static_cast<py::ssize_t>(shape.size())) return false;
  int axis = 0;
  for (const std::size_t expected : shape) {
    if (size(array, axis++) != expected) return false;
  }
  return true;
}

template <typename Function>
Function* function_of(const Kernel<Function>& kernel, const std::string& isa) {
  const Isa wanted = require_isa(isa);
  for (const KernelRow<Function>& row : kernel.rows) {
    if (row.isa == wanted) return row.function;
  }
  throw std::invalid_argument("this kernel has no implementation for " + isa);
}

void gemm(const Array<std::int8_t>& left, const Array<float>& left_scales,
          const Array<std::int32_t>& left_sums, const Array<std::int8_t>& right,
          const Array<float>& right_scales, const std::optional<Array<float>>& bias,
          const std::optional<Array<float>>& residual, Array<float>& out, std::size_t block_begin,
          std::size_t block_end, const std::string& isa) {
  require(left.ndim() == 2 && right.ndim() == 4 && right_scales.ndim() == 1, "gemm: left is 2-D, right 4-D");
  const std::size_t rows = size(left, 0), groups = size(right, 1), columns = size(right_scales, 0);
  const std::size_t blocks = (columns + kGemmColumnsPerBlock - 1) / kGemmColumnsPerBlock;
  require(has_shape(left, {rows, groups * kGemmDepthPerGroup}) && has_shape(left_scales, {rows}) &&
              has_shape(left_sums, {rows}) &&
              has_shape(right, {blocks, groups, kGemmColumnsPerBlock, kGemmDepthPerGroup}) &&
              (!bias || has_shape(*bias, {columns})) &&
              (!residual || has_shape(*residual, {rows, columns})) && has_shape(out, {rows, columns}),
          "gemm: the shapes do not fit together");
  require(block_begin <= block_end && block_end <= blocks, "gemm: no such blocks");
  function_of(gemm_f32_s8row_s8col, isa)({.left = left.data(),
                                          .left_scales = left_scales.data(),
                                          .left_sums = left_sums.data(),
                                          .right = right.data(),
                                          .right_scales = right_scales.data(),
                                          .bias = bias ? bias->data() : nullptr,
                                          .residual = residual ? residual->data() : nullptr,
                                          .out = out.mutable_data(),
                                          .rows = rows,
                                          .columns = columns,
                                          .groups = groups,
                                          .residual_stride = columns,
                                          .out_stride = columns},
                                         block_begin, block_end);
}

void block_gemm(const Array<std::int8_t>& left, const Array<float>& left_scales,
                const Array<std::int32_t>& left_sums, const Array<std::uint8_t>& right,
                const Array<std::uint16_t>& right_scales, const std::optional<Array<float>>& bias,
                const std::optional<Array<float>>& residual, Array<float>& out, std::size_t block_begin,
                std::size_t block_end, const std::string& isa) {
  require(left.ndim() == 2 && right.ndim() == 5 && out.ndim() == 2,
          "block_gemm: left and out are 2-D, right 5-D");
  const std::size_t rows = size(left, 0), depth_blocks = size(right, 1), columns = size(out, 1);
  const std::size_t blocks = (columns + kBlockColumns - 1) / kBlockColumns;
  require(has_shape(left, {rows, depth_blocks * kBlockDepth}) && has_shape(left_scales, {rows}) &&
              has_shape(left_sums, {rows, depth_blocks}) &&
              has_shape(right, {blocks, depth_blocks, kBlockDepth / 8, kBlockColumns, 4}) &&
              has_shape(right_scales, {blocks, depth_blocks, 2, kBlockColumns}) &&
              (!bias || has_shape(*bias, {columns})) &&
              (!residual || has_shape(*residual, {rows, columns})) && has_shape(out, {rows, columns}),
          "block_gemm: the shapes do not fit together");
  require(block_begin <= block_end && block_end <= blocks, "block_gemm: no such blocks");
  function_of(block_gemm_f32_s8row_u4block, isa)({.left = left.data(),
                                                  .left_scales = left_scales.data(),
                                                  .left_sums = left_sums.data(),
                                                  .right = right.data(),
                                                  .right_scales = right_scales.data(),
                                                  .bias = bias ? bias->data() : nullptr,
                                                  .residual = residual ? residual->data() : nullptr,
                                                  .out = out.mutable_data(),
                                                  .rows = rows,
                                                  .columns = columns,
                                                  .depth_blocks = depth_blocks,
                                                  .residual_stride = columns,
                                                  .out_stride = columns},
                                                 block_begin, block_end);
}

void quantize(const Array<float>& input, Array<std::int8_t>& values, Array<float>& scales,
              Array<std::int32_t>& sums, const std::string& isa) {
  require(input.ndim() == 2, "quantize: input is 2-D");
  const std::size_t rows = size(input, 0), width = size(input, 1);
  const std::size_t padded_width = (width + kGemmDepthPerGroup - 1) / kGemmDepthPerGroup * kGemmDepthPerGroup;
  require(has_shape(values, {rows, padded_width}) && has_shape(scales, {rows}) && has_shape(sums, {rows}),
          "quantize: the shapes do not fit together");
  function_of(quantize_s8row_f32, isa)({.input = input.data(),
                                        .values = values.mutable_data(),
                                        .scales = scales.mutable_data(),
                                        .sums = sums.mutable_data(),
                                        .width = width,
                                        .padded_width = padded_width},
                                       0, rows);
}

// The lowest digit first.
void quantize_on_grid(const Array<float>& input, Array<std::int8_t>& values, Array<float>& scales,
                      Array<std::int32_t>& sums, float step, const std::string& isa) {
  require(input.ndim() == 2 && values.ndim() == 3, "quantize_on_grid: input is 2-D, values 3-D");
  const std::size_t rows = size(input, 0), width = size(input, 1), num_digits = size(values, 0);
  const std::size_t padded_width = (width + kGemmDepthPerGroup - 1) / kGemmDepthPerGroup * kGemmDepthPerGroup;
  require((num_digits == 1 || num_digits == 2) && has_shape(values, {num_digits, rows, padded_width}) &&
              has_shape(scales, {num_digits, rows}) && has_shape(sums, {num_digits, rows}),
          "quantize_on_grid: the shapes do not fit together");
  GridDigit digits[2] = {};
  for (std::size_t i = 0; i < num_digits; ++i) {
    digits[i] = {.values = values.mutable_data() + i * rows * padded_width,
                 .scales = scales.mutable_data() + i * rows,
                 .sums = sums.mutable_data() + i * rows};
  }
  function_of(quantize_s8grid_f32, isa)({.input = input.data(),
                                         .step = step,
                                         .low = digits[0],
                                         .high = digits[1],
                                         .width = width,
                                         .padded_width = padded_width},
                                        0, rows);
}

void rms_norm(const Array<float>& input, const Array<float>& weight, Array<float>& out, float epsilon,
              const std::string& isa) {
  require(input.ndim() == 2, "rms_norm: input is 2-D");
  const std::size_t rows = size(input, 0), width = size(input, 1);
  require(has_shape(weight, {width}) && has_shape(out, {rows, width}),
          "rms_norm: the shapes do not fit together");
  function_of(rms_norm_f32_f32, isa)({.input = input.data(),
                                      .weight = weight.data(),
                                      .out = out.mutable_data(),
                                      .width = width,
                                      .epsilon = epsilon},
                                     0, rows);
}

void binary(const Kernel<BinaryFunction>& table, const Array<float>& left, const Array<float>& right,
            Array<float>& out, const std::string& isa) {
  const std::size_t count = static_cast<std::size_t>(left.size());
  require(has_shape(left, {count}) && has_shape(right, {count}) && has_shape(out, {count}),
          "expected three 1-D arrays of one size");
  function_of(table, isa)(left.data(), right.data(), out.mutable_data(), count);
}

void round_to_grid(const Array<float>& input, const Array<float>& steps, Array<float>& out, float levels,
                   const std::string& isa) {
  const std::size_t count = static_cast<std::size_t>(input.size());
  require(has_shape(input, {count}) && has_shape(steps, {count}) && has_shape(out, {count}),
          "expected three 1-D arrays of one size");
  function_of(round_to_grid_f32_f32_f32, isa)(input.data(), steps.data(), levels, out.mutable_data(), count);
}

void widen(const Array<std::uint16_t>& input, Array<float>& out, const std::string& isa) {
  const std::size_t count = static_cast<std::size_t>(input.size());
  require(has_shape(input, {count}) && has_shape(out, {count}), "expected two 1-D arrays of one size");
  function_of(widen_f32_f16, isa)(input.data(), out.mutable_data(), count);
}

template <typename Table>
void define_unary(py::module_& kernels, const char* name, Table table) {
  kernels.def(
      name,
      [table](const Array<float>& input, Array<float>& out, const std::string& isa) {
        const std::size_t count = static_cast<std::size_t>(input.size());
        require(has_shape(input, {count}) && has_shape(out, {count}), "expected two 1-D arrays of one size");
        function_of(table, isa)(input.data(), out.mutable_data(), count);
      },
      "input"_a.noconvert(), "out"_a.noconvert(), py::kw_only(), "isa"_a);
}

template <typename Table>
void define_binary(py::module_& kernels, const char* name, Table table) {
  kernels.def(
      name,
      [table](const Array<float>& left, const Array<float>& right, Array<float>& out,
              const std::string& isa) { binary(table, left, right, out, isa); },
      "left"_a.noconvert(), "right"_a.noconvert(), "out"_a.noconvert(), py::kw_only(), "isa"_a);
}

}  // namespace

void bind_kernels(py::module_& module) {
  py::module_ kernels = module.def_submodule("kernels", "Each kernel by instruction set, for tests.");
  kernels.def("gemm", gemm, "left"_a.noconvert(), "left_scales"_a.noconvert(), "left_sums"_a.noconvert(),
              "right"_a.noconvert(), "right_scales"_a.noconvert(), "bias"_a.noconvert().none(true),
              "residual"_a.noconvert().none(true), "out"_a.noconvert(), py::kw_only(), "block_begin"_a,
              "block_end"_a, "isa"_a);
  kernels.def("block_gemm", block_gemm, "left"_a.noconvert(), "left_scales"_a.noconvert(),
              "left_sums"_a.noconvert(), "right"_a.noconvert(), "right_scales"_a.noconvert(),
              "bias"_a.noconvert().none(true), "residual"_a.noconvert().none(true), "out"_a.noconvert(),
              py::kw_only(), "block_begin"_a, "block_end"_a, "isa"_a);
  kernels.def("quantize", quantize, "input"_a.noconvert(), "values"_a.noconvert(), "scales"_a.noconvert(),
              "sums"_a.noconvert(), py::kw_only(), "isa"_a);
  kernels.def("quantize_on_grid", quantize_on_grid, "input"_a.noconvert(), "values"_a.noconvert(),
              "scales"_a.noconvert(), "sums"_a.noconvert(), py::kw_only(), "step"_a, "isa"_a);
  kernels.def("rms_norm", rms_norm, "input"_a.noconvert(), "weight"_a.noconvert(), "out"_a.noconvert(),
              py::kw_only(), "epsilon"_a, "isa"_a);
  define_binary(kernels, "add", add_f32_f32_f32);
  define_binary(kernels, "mul", mul_f32_f32_f32);
  define_binary(kernels, "silu_mul", silu_mul_f32_f32_f32);
  define_binary(kernels, "gelu_mul", gelu_mul_f32_f32_f32);
  define_unary(kernels, "sigmoid", sigmoid_f32_f32);
  define_unary(kernels, "exp", exp_f32_f32);
  define_unary(kernels, "gelu", gelu_f32_f32);
  define_unary(kernels, "softplus", softplus_f32_f32);
  define_unary(kernels, "tanh", tanh_f32_f32);
  kernels.def("round_to_grid", round_to_grid, "input"_a.noconvert(), "steps"_a.noconvert(),
              "out"_a.noconvert(), py::kw_only(), "levels"_a, "isa"_a);
  kernels.def("widen", widen, "input"_a.noconvert(), "out"_a.noconvert(), py::kw_only(), "isa"_a);
}

}  // namespace chunkrt
