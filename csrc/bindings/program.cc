// Bindings of ThreadPool, ProgramBuilder and Program.
#include "program/program.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>
#include <variant>

#include "bindings/parts.h"
#include "bindings/tensor.h"
#include "program/adapter_tables.h"
#include "program/operators/operators.h"

#ifndef _WIN32
#include <unistd.h>
#endif

namespace py = pybind11;
using namespace py::literals;

namespace chunkrt {
namespace {

using PythonShape = std::vector<std::variant<std::size_t, std::string>>;

Shape shape_of(const PythonShape& dimensions) {
  Shape shape;
  for (const auto& dimension : dimensions) {
    if (const auto* symbol = std::get_if<std::string>(&dimension)) {
      shape.push_back({.symbol = symbol_named(*symbol), .size = 0});
    } else {
      shape.push_back({.symbol = {}, .size = std::get<std::size_t>(dimension)});
    }
  }
  return shape;
}

// A forked process has none of the pool's threads, so its destructor would wait for them forever.
std::shared_ptr<ThreadPool> make_pool(std::size_t budget) {
#ifdef _WIN32
  return std::make_shared<ThreadPool>(budget);
#else
  return {new ThreadPool(budget), [owner = getpid()](ThreadPool* pool) {
            if (getpid() == owner) delete pool;
          }};
#endif
}

// Keeps an object alive. The last reference may be released in any thread.
std::shared_ptr<const void> held(const py::object& object) {
  return {new py::object(object), [](const void* reference) {
            const py::gil_scoped_acquire gil;
            delete static_cast<const py::object*>(reference);
          }};
}

ValueId add_constant(ProgramBuilder& builder, const py::array& array) {
  const TensorView view = view_of(array);
  if (!view.is_contiguous) {
    throw std::invalid_argument(
        "a constant must be contiguous row-major memory; pass numpy.ascontiguousarray of it");
  }
  return builder.constant(view.data, dtype_named(view.dtype), view.shape, held(array));
}

// a float32 [rank blocks, K, 16], b float32 [stored rows, 16], and for each block of columns in `spans` the
// first rank and the number of ranks, int64 [column blocks, 2]: see kernels/low_rank/low_rank.h.
using PythonFactors = std::tuple<py::array, py::array, py::array, std::size_t>;

LowRankFactors factors_of(const PythonFactors& given) {
  const auto& [a, b, spans, columns] = given;
  const TensorView a_view = view_of(a), b_view = view_of(b), span_view = view_of(spans);
  const bool fits = a_view.dtype == "float32" && a_view.shape.size() == 3 && a_view.shape[1] > 0 &&
                    a_view.shape[2] == kLowRankBlock && b_view.dtype == "float32" &&
                    b_view.shape.size() == 2 && b_view.shape[1] == kLowRankBlock &&
                    span_view.dtype == "int64" && span_view.shape.size() == 2 && span_view.shape[1] == 2 &&
                    a_view.is_contiguous && b_view.is_contiguous && span_view.is_contiguous && columns > 0 &&
                    span_view.shape[0] == (columns - 1) / kLowRankBlock + 1;
  require(fits,
          "the factors of an adapter must be contiguous, a float32 [blocks, K, 16], b float32 [rows, 16] "
          "and spans int64 [ceil(columns / 16), 2]");
  LowRankFactors factors = {.depth = a_view.shape[1],
                            .columns = columns,
                            .rank_blocks = a_view.shape[0],
                            .a = static_cast<const float*>(a_view.data),
                            .b = static_cast<const float*>(b_view.data),
                            .spans = {},
                            .owner = held(py::make_tuple(a, b))};
  const auto num_ranks = static_cast<std::int64_t>(factors.rank_blocks * kLowRankBlock);
  const auto* const span = static_cast<const std::int64_t*>(span_view.data);
  std::size_t num_rows = 0;
  for (std::size_t block = 0; block < span_view.shape[0]; ++block) {
    const std::int64_t first = span[2 * block], count = span[2 * block + 1];
    require(first >= 0 && count >= 0 && count <= num_ranks && first <= num_ranks - count,
            "the span of a block of columns exceeds the ranks of an adapter");
    factors.spans.push_back({static_cast<std::size_t>(first), static_cast<std::size_t>(count), num_rows});
    num_rows += static_cast<std::size_t>(count);
  }
  require(num_rows == b_view.shape[0], "the spans of an adapter have " + std::to_string(num_rows) +
                                           " rows, and b has " + std::to_string(b_view.shape[0]));
  return factors;
}

void add_adapter(AdapterTables& tables, std::int64_t number,
                 const std::map<std::string, PythonFactors>& adapter) {
  AdapterTables::Adapter converted;
  for (const auto& [weight, factors] : adapter) converted.emplace(weight, factors_of(factors));
  tables.add(number, converted);
}

std::vector<TensorView> views_of(const std::vector<py::array>& arrays) {
  std::vector<TensorView> views;
  views.reserve(arrays.size());
  for (const py::array& array : arrays) views.push_back(view_of(array));
  return views;
}

void run(Program& program, const std::vector<py::array>& inputs, const std::vector<py::array>& outputs) {
  const std::vector<TensorView> input_views = views_of(inputs), output_views = views_of(outputs);
  const py::gil_scoped_release without_gil;
  program.run(input_views, output_views);
}

using PythonSegment = std::pair<std::size_t, std::vector<py::array>>;

void run_segments(Program& program, const std::vector<py::array>& inputs,
                  const std::vector<py::array>& outputs, const std::vector<PythonSegment>& segments) {
  const std::vector<TensorView> input_views = views_of(inputs), output_views = views_of(outputs);
  std::vector<SegmentViews> segment_views;
  for (const auto& [num_rows, arrays] : segments) {
    segment_views.push_back({.num_rows = num_rows, .inputs = views_of(arrays)});
  }
  const py::gil_scoped_release without_gil;
  program.run_segments(input_views, output_views, segment_views);
}

std::pair<std::int64_t, std::map<std::string, std::int64_t>> take_times(StepTimes& times) {
  const StepTimes::Sums sums = times.take();
  std::map<std::string, std::int64_t> parts;
  for (const auto& [name, time] : sums.parts) parts[name] = time.count();
  return {sums.callers.count(), parts};
}

ValueId add_input(ProgramBuilder& builder, std::string name, const std::string& dtype,
                  const PythonShape& shape) {
  return builder.input(std::move(name), dtype_named(dtype), shape_of(shape));
}

ValueId add_state(ProgramBuilder& builder, std::string name, const PythonShape& shape) {
  return builder.state(std::move(name), shape_of(shape));
}

AttentionMath math_named(const std::string& name) {
  if (name == "float32") return AttentionMath::float32;
  if (name == "bfloat16") return AttentionMath::bfloat16;
  if (name == "int8") return AttentionMath::int8;
  throw std::invalid_argument("expected 'float32', 'bfloat16' or 'int8' as math, got '" + name + "'");
}

ValueId add_attention(ProgramBuilder& builder, ValueId qkv, ValueId position, ValueId table_row, ValueId cos,
                      ValueId sin, ValueId key_cache, ValueId value_cache, std::size_t num_heads,
                      std::size_t num_kv_heads, std::size_t head_dim, float scale, float soft_cap,
                      std::size_t window, bool has_raw_keys, const std::string& math,
                      std::optional<ValueId> qkv_bias, std::optional<ValueId> sinks, bool appends,
                      std::size_t rope_period, std::size_t rope_limit, std::size_t long_context_from) {
  return attention(builder, qkv, position, table_row, cos, sin, key_cache, value_cache,
                   {num_heads,
                    num_kv_heads,
                    head_dim,
                    scale,
                    soft_cap,
                    window,
                    has_raw_keys,
                    math_named(math),
                    appends,
                    {rope_period, rope_limit, long_context_from}},
                   qkv_bias, sinks);
}

ValueId add_routed_experts(ProgramBuilder& builder, ValueId hidden, ValueId router_logits, ValueId gate_up,
                           ValueId gate_up_scales, ValueId down, ValueId down_scales,
                           std::optional<ValueId> selection_bias, std::optional<ValueId> gate_up_bias,
                           std::optional<ValueId> down_bias, std::size_t top_k, bool norm_topk_prob,
                           bool use_sigmoid, float norm_epsilon, float swiglu_alpha, float swiglu_limit,
                           bool uses_gelu, std::size_t num_groups, std::size_t top_groups,
                           std::size_t best_of_group) {
  return routed_experts(
      builder, hidden, router_logits, gate_up, gate_up_scales, down, down_scales, selection_bias,
      {top_k, norm_topk_prob, use_sigmoid, norm_epsilon, num_groups, top_groups, best_of_group},
      {gate_up_bias, down_bias}, {swiglu_alpha, swiglu_limit, uses_gelu});
}

ValueId add_delta_rule(ProgramBuilder& builder, ValueId qkv, ValueId gate, ValueId beta, ValueId conv_weight,
                       std::optional<ValueId> conv_bias, ValueId conv_state, ValueId recurrent_state,
                       std::size_t num_k_heads, std::size_t num_v_heads, std::size_t head_k_dim,
                       std::size_t head_v_dim, bool use_qk_l2norm) {
  return gated_delta_rule(builder, qkv, gate, beta, conv_weight, conv_bias, conv_state, recurrent_state,
                          {num_k_heads, num_v_heads, head_k_dim, head_v_dim, use_qk_l2norm});
}

ValueId add_mamba2(ProgramBuilder& builder, ValueId cbx, ValueId gate, ValueId step, ValueId conv_weight,
                   std::optional<ValueId> conv_bias, ValueId conv_state, ValueId recurrent_state,
                   ValueId skip, std::size_t num_groups, std::size_t num_heads, std::size_t state_dim,
                   std::size_t head_dim) {
  return mamba2(builder, cbx, gate, step, conv_weight, conv_bias, conv_state, recurrent_state, skip,
                {num_groups, num_heads, state_dim, head_dim});
}

}  // namespace

void bind_program(py::module_& module) {
  py::class_<ThreadPool, std::shared_ptr<ThreadPool>>(module, "ThreadPool",
                                                      "Thread budget of all programs that are built with it.")
      .def(py::init(&make_pool), "budget"_a)
      .def_property_readonly("budget", &ThreadPool::budget);

  py::class_<StepTimes, std::shared_ptr<StepTimes>>(module, "StepTimes", "Durations of program steps.")
      .def(py::init<>())
      .def("take", take_times);

  py::class_<AdapterTables, std::shared_ptr<AdapterTables>>(module, "AdapterTables",
                                                            "The factors of loaded LoRA adapters.")
      .def(py::init<>())
      .def("add", add_adapter, "number"_a, "factors"_a)
      .def("remove", &AdapterTables::remove, "number"_a);

  py::class_<Program>(module, "Program", "A compiled subgraph.")
      .def("run", run, "inputs"_a.noconvert(), "outputs"_a.noconvert())
      .def("run_segments", run_segments, "inputs"_a.noconvert(), "outputs"_a.noconvert(),
           "segments"_a.noconvert())
      .def_property_readonly("arena_bytes", &Program::arena_bytes)
      .def_property_readonly("num_loops", &Program::num_loops)
      .def_property_readonly("step_names", &Program::step_names);

  py::class_<ProgramBuilder>(module, "ProgramBuilder", "Builds a program, operator by operator.")
      .def(py::init<std::shared_ptr<ThreadPool>, std::size_t, std::shared_ptr<StepTimes>>(), "pool"_a,
           "max_rows"_a, "times"_a = py::none())
      .def("input", add_input, "name"_a, "dtype"_a, "shape"_a)
      .def("state", add_state, "name"_a, "shape"_a)
      .def("constant", add_constant, "array"_a.noconvert())
      .def("output", &ProgramBuilder::output, "name"_a, "value"_a)
      .def(
          "gather",
          [](ProgramBuilder& builder, ValueId table, ValueId indices) {
            return gather(builder, table, indices);
          },
          "table"_a, "indices"_a)
      .def(
          "gather_share",
          [](ProgramBuilder& builder, ValueId table, ValueId indices, std::size_t first,
             std::size_t all_rows) {
            return gather(builder, table, indices, TableShare{.first = first, .all_rows = all_rows});
          },
          "table"_a, "indices"_a, py::kw_only(), "first"_a, "all_rows"_a)
      .def("pick_columns", pick_columns, "input"_a, "ranges"_a)
      .def("columns", columns, "input"_a, "begin"_a, "width"_a)
      .def("concat", concat, "inputs"_a)
      .def("rms_norm", rms_norm, "input"_a, "weight"_a, "epsilon"_a)
      .def("layer_norm", layer_norm, "input"_a, "weight"_a, "bias"_a, "epsilon"_a)
      .def("add_positions", add_positions, "input"_a, "table"_a, "position"_a)
      .def("head_norm", head_norm, "input"_a, "weight"_a, "epsilon"_a)
      .def("add", add, "left"_a, "right"_a)
      .def("mul", mul, "left"_a, "right"_a)
      .def("sigmoid", sigmoid, "input"_a)
      .def("gelu", gelu, "input"_a)
      .def("thresholded_relu", thresholded_relu, "input"_a, "threshold"_a)
      .def("erf_gelu", erf_gelu, "input"_a)
      .def("quick_gelu", quick_gelu, "input"_a)
      .def("xielu", xielu, "input"_a, "parameters"_a)
      .def("relu", relu, "input"_a)
      .def("softplus", softplus, "input"_a)
      .def("tanh", tanh, "input"_a)
      .def("round_to_grid", round_to_grid, "input"_a, "step"_a, "levels"_a)
      .def("silu_mul", silu_mul, "input"_a)
      .def("gelu_mul", gelu_mul, "input"_a)
      .def("linear", linear, "input"_a, "packed"_a, "scales"_a, "bias"_a = py::none(),
           "residual"_a = py::none(), "num_digits"_a = 1, "input_step"_a = py::none(),
           "multipliers"_a = py::none())
      .def("float_linear", float_linear, "input"_a, "weight"_a)
      .def("low_rank_sum", low_rank_sum, "product"_a, "input"_a, "adapters"_a, "tables"_a, "weight"_a)
      .def("block_linear", block_linear, "input"_a, "packed"_a, "block_scales"_a, "columns"_a,
           "bias"_a = py::none(), "residual"_a = py::none())
      .def("shadow_linear", shadow_linear, "input"_a, "packed"_a, "scales"_a, "input_step"_a,
           "hot_channels"_a)
      .def("routed_experts", add_routed_experts, "hidden"_a, "router_logits"_a, "gate_up"_a,
           "gate_up_scales"_a, "down"_a, "down_scales"_a, "selection_bias"_a = py::none(),
           "gate_up_bias"_a = py::none(), "down_bias"_a = py::none(), py::kw_only(), "top_k"_a,
           "norm_topk_prob"_a, "use_sigmoid"_a = false, "norm_epsilon"_a = 0.0f, "swiglu_alpha"_a = 1.0f,
           "swiglu_limit"_a = 0.0f, "uses_gelu"_a = false, "num_groups"_a = 1, "top_groups"_a = 1,
           "best_of_group"_a = 1)
      .def("attention", add_attention, "qkv"_a, "position"_a, "table_row"_a, "cos"_a, "sin"_a, "key_cache"_a,
           "value_cache"_a, py::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a,
           "soft_cap"_a = 0.0f, "window"_a = 0, "has_raw_keys"_a = false, "math"_a = "float32",
           "qkv_bias"_a = py::none(), "sinks"_a = py::none(), "appends"_a = true, "rope_period"_a = 0,
           "rope_limit"_a = 0, "long_context_from"_a = 0)
      .def("short_conv", short_conv, "bcx"_a, "conv_weight"_a, "conv_bias"_a, "conv_state"_a)
      .def("silu_conv", silu_conv, "x"_a, "conv_weight"_a, "conv_bias"_a, "conv_state"_a)
      .def("selective_scan", selective_scan, "x"_a, "step"_a, "bc"_a, "rates"_a, "skip"_a, "state"_a)
      .def("gated_delta_rule", add_delta_rule, "qkv"_a, "gate"_a, "beta"_a, "conv_weight"_a, "conv_bias"_a,
           "conv_state"_a, "recurrent_state"_a, py::kw_only(), "num_k_heads"_a, "num_v_heads"_a,
           "head_k_dim"_a, "head_v_dim"_a, "use_qk_l2norm"_a)
      .def("mamba2", add_mamba2, "cbx"_a, "gate"_a, "step"_a, "conv_weight"_a, "conv_bias"_a, "conv_state"_a,
           "recurrent_state"_a, "skip"_a, py::kw_only(), "num_groups"_a, "num_heads"_a, "state_dim"_a,
           "head_dim"_a)
      .def("build", &ProgramBuilder::build);
}

}  // namespace chunkrt
