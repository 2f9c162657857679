// Element-wise operators.
#include <cmath>
#include <span>
#include <vector>

#include "kernels/dispatch.h"
#include "program/operators/activations.h"
#include "program/operators/operators.h"

namespace chunkrt {
namespace {

// up to here float32 represents every integer and half
constexpr std::size_t kMostLevels = std::size_t{1} << 23;

ValueId binary(ProgramBuilder& builder, ValueId left, ValueId right, const char* what,
               BinaryFunction* kernel) {
  const Symbol symbol = builder.rows_of(left, what);
  const std::size_t width = builder.width_of(left);
  const Value& other = builder.value(right);
  const bool is_row = other.kind == ValueKind::constant && other.dtype == Dtype::float32 &&
                      other.shape == Shape{fixed(width)};
  require(is_row || (other.dtype == Dtype::float32 && other.shape == builder.value(left).shape),
          std::string(what) + ": expected the right side to be " +
              describe(Dtype::float32, builder.value(left).shape) + " or a constant " +
              describe(Dtype::float32, {fixed(width)}) + ", got " + describe(other.dtype, other.shape));
  const ValueId out = builder.float_rows(symbol, width);
  builder.add_row_step(
      symbol, what, {left, right, out}, [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
        for (std::size_t row = begin; row < end; ++row) {
          const float* right_row = frame.get<const float>(right) + (is_row ? 0 : row * width);
          kernel(frame.get<const float>(left) + row * width, right_row, frame.get<float>(out) + row * width,
                 width);
        }
      });
  return out;
}

ValueId unary(ProgramBuilder& builder, ValueId input, const char* what, UnaryFunction* kernel) {
  const Symbol symbol = builder.rows_of(input, what);
  const std::size_t width = builder.width_of(input);
  const ValueId out = builder.float_rows(symbol, width);
  builder.add_row_step(symbol, what, {input, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         kernel(frame.get<const float>(input) + begin * width,
                                frame.get<float>(out) + begin * width, (end - begin) * width);
                       });
  return out;
}

ValueId gated(ProgramBuilder& builder, ValueId input, const char* what, BinaryFunction* kernel) {
  const Symbol symbol = builder.rows_of(input, what);
  require(builder.width_of(input) % 2 == 0,
          std::string(what) + ": expected an even width, got " + std::to_string(builder.width_of(input)));
  const std::size_t width = builder.width_of(input) / 2;
  const ValueId out = builder.float_rows(symbol, width);
  builder.add_row_step(symbol, what, {input, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         for (std::size_t row = begin; row < end; ++row) {
                           const float* gate = frame.get<const float>(input) + row * 2 * width;
                           kernel(gate, gate + width, frame.get<float>(out) + row * width, width);
                         }
                       });
  return out;
}

}  // namespace

ValueId add(ProgramBuilder& builder, ValueId left, ValueId right) {
  return binary(builder, left, right, "add", select_kernel(add_f32_f32_f32).function);
}

ValueId mul(ProgramBuilder& builder, ValueId left, ValueId right) {
  const Symbol symbol = builder.rows_of(left, "mul");
  const std::size_t width = builder.width_of(left);
  if (width > 1 && builder.value(right).shape == Shape{rows_dimension(symbol), fixed(1)}) {
    builder.rows_of(right, "mul's right side");
    const ValueId out = builder.float_rows(symbol, width);
    builder.add_row_step(symbol, "mul", {left, right, out},
                         [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                           for (std::size_t i = begin * width; i < end * width; ++i) {
                             frame.get<float>(out)[i] =
                                 frame.get<const float>(left)[i] * frame.get<const float>(right)[i / width];
                           }
                         });
    return out;
  }
  return binary(builder, left, right, "mul", select_kernel(mul_f32_f32_f32).function);
}

ValueId sigmoid(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "sigmoid", select_kernel(sigmoid_f32_f32).function);
}

ValueId exp(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "exp", select_kernel(exp_f32_f32).function);
}

ValueId gelu(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "gelu", select_kernel(gelu_f32_f32).function);
}

ValueId erf_gelu(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "erf_gelu", select_kernel(erf_gelu_f32_f32).function);
}

ValueId quick_gelu(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "quick_gelu", select_kernel(quick_gelu_f32_f32).function);
}

ValueId xielu(ProgramBuilder& builder, ValueId input, ValueId parameters) {
  const Symbol symbol = builder.rows_of(input, "xielu");
  const std::size_t width = builder.width_of(input);
  builder.require_constant(parameters, Dtype::float32, {fixed(4)}, "xielu's parameters");
  const ValueId out = builder.float_rows(symbol, width);
  XieluFunction* kernel = select_kernel(xielu_f32_f32).function;
  builder.add_row_step(symbol, "xielu", {input, parameters, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         kernel(frame.get<const float>(input) + begin * width,
                                frame.get<const float>(parameters), frame.get<float>(out) + begin * width,
                                (end - begin) * width);
                       });
  return out;
}

ValueId relu(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "relu", select_kernel(relu_f32_f32).function);
}

ValueId thresholded_relu(ProgramBuilder& builder, ValueId input, float threshold) {
  const Symbol symbol = builder.rows_of(input, "thresholded_relu");
  const std::size_t width = builder.width_of(input);
  const ValueId out = builder.float_rows(symbol, width);
  const float least = std::nextafter(threshold, INFINITY);  // the first value above the threshold
  ThresholdFunction* kernel = select_kernel(thresholded_relu_f32_f32).function;
  builder.add_row_step(symbol, "thresholded_relu", {input, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         kernel(frame.get<const float>(input) + begin * width, least,
                                frame.get<float>(out) + begin * width, (end - begin) * width);
                       });
  return out;
}

ValueId softplus(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "softplus", select_kernel(softplus_f32_f32).function);
}

ValueId tanh(ProgramBuilder& builder, ValueId input) {
  return unary(builder, input, "tanh", select_kernel(tanh_f32_f32).function);
}

ValueId round_to_grid(ProgramBuilder& builder, ValueId input, ValueId step, std::size_t levels) {
  const Symbol symbol = builder.rows_of(input, "round_to_grid");
  const std::size_t width = builder.width_of(input);
  require(levels >= 1 && levels <= kMostLevels, "round_to_grid: expected 1 to " +
                                                    std::to_string(kMostLevels) + " levels, got " +
                                                    std::to_string(levels));
  const bool is_one = builder.value(step).shape == Shape{fixed(1)};
  builder.require_constant(step, Dtype::float32, {fixed(is_one ? 1 : width)}, "round_to_grid's step");
  const std::span given(static_cast<const float*>(builder.value(step).data), is_one ? 1 : width);
  for (const float one : given) require_step(one, "round_to_grid's step");
  const ValueId steps = is_one ? builder.floats(std::vector<float>(width, given[0])) : step;
  const ValueId out = builder.float_rows(symbol, width);
  RoundToGridFunction* kernel = select_kernel(round_to_grid_f32_f32_f32).function;
  builder.add_row_step(symbol, "round_to_grid", {input, steps, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         for (std::size_t row = begin; row < end; ++row) {
                           kernel(frame.get<const float>(input) + row * width, frame.get<const float>(steps),
                                  static_cast<float>(levels), frame.get<float>(out) + row * width, width);
                         }
                       });
  return out;
}

ValueId silu_mul(ProgramBuilder& builder, ValueId input) {
  return gated(builder, input, "silu_mul", select_kernel(silu_mul_f32_f32_f32).function);
}

ValueId gelu_mul(ProgramBuilder& builder, ValueId input) {
  return gated(builder, input, "gelu_mul", select_kernel(gelu_mul_f32_f32_f32).function);
}

}  // namespace chunkrt
