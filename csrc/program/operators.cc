// The operators of ProgramBuilder but the linears and linear attention: what each requires of its operands,
// and the kernels it calls.
#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

#include "kernels/dispatch.h"
#include "program/builder.h"

namespace chunkrt {
namespace {

constexpr std::size_t kMostLevels = std::size_t{1} << 23;  // up to here float32 has every integer and half

void check_indices(const std::string& name, const std::int64_t* indices, std::size_t count,
                   std::size_t limit) {
  for (std::size_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || static_cast<std::size_t>(indices[i]) >= limit) {
      throw std::out_of_range("input '" + name + "': index " + std::to_string(indices[i]) + " at row " +
                              std::to_string(i) + " is outside 0.." + std::to_string(limit - 1));
    }
  }
}

}  // namespace

ValueId ProgramBuilder::gather(ValueId table, ValueId indices) {
  const Value& source = value(table);
  const Value& rows = value(indices);
  require(rows.kind == ValueKind::input && rows.dtype == Dtype::int64 && rows.shape.size() == 1 &&
              counts_rows(rows.shape[0]),
          "gather: expected the indices to be an input int64 [T] or [R], got " +
              describe(rows.dtype, rows.shape));
  const bool is_constant = source.kind == ValueKind::constant && source.shape.size() == 2;
  if (!is_constant) rows_of(table, "gather's table");
  const bool is_half = is_constant && source.dtype == Dtype::float16;
  require(is_half || source.dtype == Dtype::float32,
          "gather: expected a float32 or float16 table, got " + describe(source.dtype, source.shape));

  const Symbol symbol = *rows.shape[0].symbol;
  const Dimension height = source.shape[0];
  const std::size_t width = source.shape[1].size;
  definition_.checks.push_back([=, name = rows.name](const Frame& frame) {
    const std::size_t limit = height.symbol ? frame.size_of(*height.symbol) : height.size;
    check_indices(name, frame.get<const std::int64_t>(indices), frame.size_of(symbol), limit);
  });

  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  WidenFunction* widen = select_kernel(widen_f32_f16).function;
  Step step = [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
    const std::int64_t* index = frame.get<const std::int64_t>(indices);
    for (std::size_t row = begin; row < end; ++row) {
      float* target = frame.get<float>(out) + row * width;
      const std::size_t offset = static_cast<std::size_t>(index[row]) * width;
      if (is_half) {
        widen(frame.get<const std::uint16_t>(table) + offset, target, width);
      } else {
        std::memcpy(target, frame.get<const float>(table) + offset, width * sizeof(float));
      }
    }
  };
  if (is_constant) {
    add_row_step(symbol, {table, indices, out}, std::move(step));
  } else {  // other rows of the table may still be in the making: a stage of its own
    add_stage([symbol](const Frame& frame) { return frame.size_of(symbol); }, 1, {table, indices, out},
              std::move(step));
  }
  return out;
}

ValueId ProgramBuilder::rms_norm(ValueId input, ValueId weight, float epsilon) {
  const Symbol symbol = rows_of(input, "rms_norm's input");
  const std::size_t width = width_of(input);
  require_constant(weight, Dtype::float32, {fixed(width)}, "rms_norm's weight");
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  RmsNormFunction* kernel = select_kernel(rms_norm_f32_f32).function;
  add_row_step(symbol, {input, weight, out},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 kernel({.input = frame.get<const float>(input),
                         .weight = frame.get<const float>(weight),
                         .out = frame.get<float>(out),
                         .width = width,
                         .epsilon = epsilon},
                        begin, end);
               });
  return out;
}

ValueId ProgramBuilder::head_norm(ValueId input, ValueId weight, float epsilon) {
  const Symbol symbol = rows_of(input, "head_norm's input");
  const std::size_t width = width_of(input);
  const Shape& heads = value(weight).shape;
  require(
      heads.size() == 2 && heads[0].size > 0 && heads[1].size > 0 && heads[1].size <= width / heads[0].size,
      "head_norm: expected a weight [heads, columns] that fits " +
          describe(Dtype::float32, value(input).shape) + ", got " + describe(value(weight).dtype, heads));
  require_constant(weight, Dtype::float32, heads, "head_norm's weight");
  const std::size_t num_heads = heads[0].size, head_dim = heads[1].size, normed = num_heads * head_dim;
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  RmsNormFunction* kernel = select_kernel(rms_norm_f32_f32).function;
  add_row_step(symbol, {input, weight, out},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 for (std::size_t row = begin; row < end; ++row) {
                   const float* source = frame.get<const float>(input) + row * width;
                   float* target = frame.get<float>(out) + row * width;
                   for (std::size_t head = 0; head < num_heads; ++head) {
                     const std::size_t first = head * head_dim;
                     kernel({.input = source + first,
                             .weight = frame.get<const float>(weight) + first,
                             .out = target + first,
                             .width = head_dim,
                             .epsilon = epsilon},
                            0, 1);
                   }
                   std::memcpy(target + normed, source + normed, (width - normed) * sizeof(float));
                 }
               });
  return out;
}

ValueId ProgramBuilder::binary(ValueId left, ValueId right, const char* what, BinaryFunction* kernel) {
  const Symbol symbol = rows_of(left, what);
  const std::size_t width = width_of(left);
  const Value& other = value(right);
  const bool is_row = other.kind == ValueKind::constant && other.dtype == Dtype::float32 &&
                      other.shape == Shape{fixed(width)};
  require(is_row || (other.dtype == Dtype::float32 && other.shape == value(left).shape),
          std::string(what) + ": expected the right side to be " +
              describe(Dtype::float32, value(left).shape) + " or a constant " +
              describe(Dtype::float32, {fixed(width)}) + ", got " + describe(other.dtype, other.shape));
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  add_row_step(symbol, {left, right, out},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 for (std::size_t row = begin; row < end; ++row) {
                   const float* right_row = frame.get<const float>(right) + (is_row ? 0 : row * width);
                   kernel(frame.get<const float>(left) + row * width, right_row,
                          frame.get<float>(out) + row * width, width);
                 }
               });
  return out;
}

ValueId ProgramBuilder::add(ValueId left, ValueId right) {
  return binary(left, right, "add", select_kernel(add_f32_f32_f32).function);
}

ValueId ProgramBuilder::mul(ValueId left, ValueId right) {
  const Symbol symbol = rows_of(left, "mul");
  const std::size_t width = width_of(left);
  if (width > 1 && value(right).shape == Shape{rows_dimension(symbol), fixed(1)}) {
    rows_of(right, "mul's right side");
    const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
    add_row_step(symbol, {left, right, out},
                 [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                   for (std::size_t i = begin * width; i < end * width; ++i) {
                     frame.get<float>(out)[i] =
                         frame.get<const float>(left)[i] * frame.get<const float>(right)[i / width];
                   }
                 });
    return out;
  }
  return binary(left, right, "mul", select_kernel(mul_f32_f32_f32).function);
}

ValueId ProgramBuilder::unary(ValueId input, const char* what, UnaryFunction* kernel) {
  const Symbol symbol = rows_of(input, what);
  const std::size_t width = width_of(input);
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  add_row_step(symbol, {input, out}, [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
    kernel(frame.get<const float>(input) + begin * width, frame.get<float>(out) + begin * width,
           (end - begin) * width);
  });
  return out;
}

ValueId ProgramBuilder::sigmoid(ValueId input) {
  return unary(input, "sigmoid", select_kernel(sigmoid_f32_f32).function);
}

ValueId ProgramBuilder::gelu(ValueId input) {
  return unary(input, "gelu", select_kernel(gelu_f32_f32).function);
}

ValueId ProgramBuilder::softplus(ValueId input) {
  return unary(input, "softplus", select_kernel(softplus_f32_f32).function);
}

ValueId ProgramBuilder::tanh(ValueId input) {
  return unary(input, "tanh", select_kernel(tanh_f32_f32).function);
}

ValueId ProgramBuilder::round_to_grid(ValueId input, ValueId step, std::size_t levels) {
  const Symbol symbol = rows_of(input, "round_to_grid");
  const std::size_t width = width_of(input);
  require(levels >= 1 && levels <= kMostLevels, "round_to_grid: expected 1 to " +
                                                    std::to_string(kMostLevels) + " levels, got " +
                                                    std::to_string(levels));
  const bool is_one = value(step).shape == Shape{fixed(1)};
  require_constant(step, Dtype::float32, {fixed(is_one ? 1 : width)}, "round_to_grid's step");
  const std::span given(static_cast<const float*>(value(step).data), is_one ? 1 : width);
  for (const float one : given) require_step(one, "round_to_grid's step");
  const ValueId steps = is_one ? floats(std::vector<float>(width, given[0])) : step;
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  RoundToGridFunction* kernel = select_kernel(round_to_grid_f32_f32_f32).function;
  add_row_step(symbol, {input, steps, out},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 for (std::size_t row = begin; row < end; ++row) {
                   kernel(frame.get<const float>(input) + row * width, frame.get<const float>(steps),
                          static_cast<float>(levels), frame.get<float>(out) + row * width, width);
                 }
               });
  return out;
}

ValueId ProgramBuilder::gated(ValueId input, const char* what, BinaryFunction* kernel) {
  const Symbol symbol = rows_of(input, what);
  require(width_of(input) % 2 == 0,
          std::string(what) + ": expected an even width, got " + std::to_string(width_of(input)));
  const std::size_t width = width_of(input) / 2;
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  add_row_step(symbol, {input, out}, [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
    for (std::size_t row = begin; row < end; ++row) {
      const float* gate = frame.get<const float>(input) + row * 2 * width;
      kernel(gate, gate + width, frame.get<float>(out) + row * width, width);
    }
  });
  return out;
}

ValueId ProgramBuilder::silu_mul(ValueId input) {
  return gated(input, "silu_mul", select_kernel(silu_mul_f32_f32_f32).function);
}

ValueId ProgramBuilder::gelu_mul(ValueId input) {
  return gated(input, "gelu_mul", select_kernel(gelu_mul_f32_f32_f32).function);
}

ValueId ProgramBuilder::columns(ValueId input, std::size_t begin_column, std::size_t width) {
  const Symbol symbol = rows_of(input, "columns");
  const std::size_t input_width = width_of(input);
  require(width >= 1 && width <= input_width && begin_column <= input_width - width,
          "columns: " + std::to_string(width) + " columns from " + std::to_string(begin_column) +
              " on are not inside " + describe(Dtype::float32, value(input).shape));
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  add_row_step(symbol, {input, out}, [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
    for (std::size_t row = begin; row < end; ++row) {
      const float* source = frame.get<const float>(input) + row * input_width + begin_column;
      std::memcpy(frame.get<float>(out) + row * width, source, width * sizeof(float));
    }
  });
  return out;
}

}  // namespace chunkrt
