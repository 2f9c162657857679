// The operators of ProgramBuilder: what each requires of its operands, and the kernels it calls.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels/tables.h"
#include "program/builder.h"

namespace chunkrt {
namespace {

// Panels of three blocks are what the widest gemm kernel likes best; the others do not mind.
constexpr std::size_t kGemmBlocksPerPiece = 3;

std::size_t ceil_divide(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }

Dimension fixed(std::size_t size) { return {.symbol = {}, .size = size}; }

Dimension rows_dimension(Symbol symbol) { return {.symbol = symbol, .size = 0}; }

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
              rows.shape[0].symbol,
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
  WidenFunction* widen = select_kernel(widen_f32_f16_table()).function;
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
  RmsNormFunction* kernel = select_kernel(rms_norm_f32_f32_table()).function;
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

ProgramBuilder::Quantized ProgramBuilder::quantize(ValueId input) {
  if (const auto found = quantized_.find(input); found != quantized_.end()) return found->second;
  const Symbol symbol = rows_of(input, "linear's input");
  const std::size_t width = width_of(input);
  const std::size_t padded_width = ceil_divide(width, kGemmDepthPerGroup) * kGemmDepthPerGroup;
  const Quantized out = {
      .values = temporary(Dtype::int8, {rows_dimension(symbol), fixed(padded_width)}),
      .scales = temporary(Dtype::float32, {rows_dimension(symbol)}),
      .sums = temporary(Dtype::int32, {rows_dimension(symbol)}),
  };
  QuantizeFunction* kernel = select_kernel(quantize_s8row_f32_table()).function;
  add_row_step(symbol, {input, out.values, out.scales, out.sums},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 kernel({.input = frame.get<const float>(input),
                         .values = frame.get<std::int8_t>(out.values),
                         .scales = frame.get<float>(out.scales),
                         .sums = frame.get<std::int32_t>(out.sums),
                         .width = width,
                         .padded_width = padded_width},
                        begin, end);
               });
  quantized_[input] = out;
  return out;
}

ValueId ProgramBuilder::remainder(ValueId input, const Quantized& quantized) {
  const Symbol symbol = rows_of(input, "linear's input");
  const std::size_t width = width_of(input);
  const std::size_t padded_width = ceil_divide(width, kGemmDepthPerGroup) * kGemmDepthPerGroup;
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  add_row_step(symbol, {input, quantized.values, quantized.scales, out},
               [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                 for (std::size_t row = begin; row < end; ++row) {
                   const float scale = frame.get<const float>(quantized.scales)[row];
                   const std::int8_t* values =
                       frame.get<const std::int8_t>(quantized.values) + row * padded_width;
                   const float* source = frame.get<const float>(input) + row * width;
                   float* target = frame.get<float>(out) + row * width;
                   for (std::size_t i = 0; i < width; ++i) {
                     target[i] = source[i] - static_cast<float>(values[i]) * scale;
                   }
                 }
               });
  return out;
}

ValueId ProgramBuilder::linear(ValueId input, ValueId packed, ValueId scales, std::optional<ValueId> bias,
                               std::optional<ValueId> residual, std::size_t num_digits) {
  require(num_digits == 1 || num_digits == 2,
          "linear: activations take 1 or 2 digits, not " + std::to_string(num_digits));
  const Symbol symbol = rows_of(input, "linear's input");
  const std::size_t depth = width_of(input);
  require(depth <= kGemmMaxDepth, "linear: " + std::to_string(depth) +
                                      " inputs are too many to sum in int32; at most " +
                                      std::to_string(kGemmMaxDepth) + " are");
  require(value(scales).shape.size() == 1,
          "linear: expected scales float32 [N], got " + describe(value(scales).dtype, value(scales).shape));
  const std::size_t columns = value(scales).shape[0].size;
  const std::size_t groups = ceil_divide(depth, kGemmDepthPerGroup);
  const std::size_t blocks = ceil_divide(columns, kGemmColumnsPerBlock);
  require_constant(scales, Dtype::float32, {fixed(columns)}, "linear's scales");
  require_constant(packed, Dtype::int8,
                   {fixed(blocks), fixed(groups), fixed(kGemmColumnsPerBlock), fixed(kGemmDepthPerGroup)},
                   "linear's packed weight");
  if (bias) require_constant(*bias, Dtype::float32, {fixed(columns)}, "linear's bias");
  if (residual) {
    require(rows_of(*residual, "linear's residual") == symbol && width_of(*residual) == columns,
            "linear: the residual's shape is not the result's");
  }

  std::vector<Quantized> digits = {quantize(input)};
  if (num_digits == 2) digits.push_back(quantize(remainder(input, digits.front())));
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(columns)});
  std::vector<ValueId> uses = {packed, scales, out};
  for (const Quantized& digit : digits) uses.insert(uses.end(), {digit.values, digit.scales, digit.sums});
  if (bias) uses.push_back(*bias);
  if (residual) uses.push_back(*residual);
  GemmFunction* kernel = select_kernel(gemm_f32_s8row_s8col_table()).function;
  add_stage([blocks](const Frame&) { return blocks; }, kGemmBlocksPerPiece, uses,
            [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
              GemmArgs args = {.left = nullptr,
                               .left_scales = nullptr,
                               .left_sums = nullptr,
                               .right = frame.get<const std::int8_t>(packed),
                               .right_scales = frame.get<const float>(scales),
                               .bias = nullptr,
                               .residual = nullptr,
                               .out = frame.get<float>(out),
                               .rows = frame.size_of(symbol),
                               .columns = columns,
                               .groups = groups,
                               .residual_stride = columns,
                               .out_stride = columns};
              // Panel by panel, so that the second digit finds the weights in the cache.
              const std::size_t panel = digits.size() == 1 ? end - begin : kGemmBlocksPerPiece;
              for (std::size_t block = begin; block < end; block += panel) {
                args.bias = bias ? frame.get<const float>(*bias) : nullptr;
                args.residual = residual ? frame.get<const float>(*residual) : nullptr;
                for (const Quantized& digit : digits) {
                  args.left = frame.get<const std::int8_t>(digit.values);
                  args.left_scales = frame.get<const float>(digit.scales);
                  args.left_sums = frame.get<const std::int32_t>(digit.sums);
                  kernel(args, block, std::min(block + panel, end));
                  args.bias = nullptr;
                  args.residual = args.out;
                }
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
  return binary(left, right, "add", select_kernel(add_f32_f32_f32_table()).function);
}

ValueId ProgramBuilder::mul(ValueId left, ValueId right) {
  return binary(left, right, "mul", select_kernel(mul_f32_f32_f32_table()).function);
}

ValueId ProgramBuilder::sigmoid(ValueId input) {
  const Symbol symbol = rows_of(input, "sigmoid");
  const std::size_t width = width_of(input);
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  UnaryFunction* kernel = select_kernel(sigmoid_f32_f32_table()).function;
  add_row_step(symbol, {input, out}, [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
    kernel(frame.get<const float>(input) + begin * width, frame.get<float>(out) + begin * width,
           (end - begin) * width);
  });
  return out;
}

ValueId ProgramBuilder::silu_mul(ValueId input) {
  const Symbol symbol = rows_of(input, "silu_mul");
  require(width_of(input) % 2 == 0,
          "silu_mul: expected an even width, got " + std::to_string(width_of(input)));
  const std::size_t width = width_of(input) / 2;
  const ValueId out = temporary(Dtype::float32, {rows_dimension(symbol), fixed(width)});
  SiluMulFunction* kernel = select_kernel(silu_mul_f32_f32_f32_table()).function;
  add_row_step(symbol, {input, out}, [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
    for (std::size_t row = begin; row < end; ++row) {
      const float* gate = frame.get<const float>(input) + row * 2 * width;
      kernel(gate, gate + width, frame.get<float>(out) + row * width, width);
    }
  });
  return out;
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

ValueId ProgramBuilder::attention(ValueId qkv, ValueId position, ValueId cos, ValueId sin, ValueId key_cache,
                                  ValueId value_cache, const AttentionShape& shape) {
  const std::size_t num_heads = shape.num_heads, num_kv_heads = shape.num_kv_heads, head_dim = shape.head_dim;
  const float scale = shape.scale;
  const std::size_t most_heads = head_dim > 0 ? width_of(qkv) / head_dim : 0;
  require(num_heads <= most_heads && num_kv_heads <= most_heads,
          "attention: more heads than qkv has room for: " + std::to_string(num_heads) + " and " +
              std::to_string(num_kv_heads) + " of " + std::to_string(head_dim) + " columns");
  require(num_kv_heads > 0 && head_dim > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
          "attention: expected the number of heads to be a multiple of that of kv heads, got " +
              std::to_string(num_heads) + " and " + std::to_string(num_kv_heads));
  const std::size_t qkv_width = (num_heads + 2 * num_kv_heads) * head_dim;
  require(rows_of(qkv, "attention's qkv") == Symbol::T && width_of(qkv) == qkv_width,
          "attention: expected qkv " +
              describe(Dtype::float32, {rows_dimension(Symbol::T), fixed(qkv_width)}) + ", got " +
              describe(Dtype::float32, value(qkv).shape));
  const Value& start = value(position);
  require(start.kind == ValueKind::input && start.dtype == Dtype::int64 && start.shape == Shape{fixed(1)},
          "attention: expected position to be an input int64 [1], got " + describe(start.dtype, start.shape));
  const Shape cache_shape = {fixed(num_kv_heads), rows_dimension(Symbol::P), fixed(head_dim)};
  for (const ValueId id : {key_cache, value_cache}) {
    const Value& cache = value(id);
    require(cache.kind == ValueKind::state && cache.shape == cache_shape,
            "attention: expected the caches to be states " + describe(cache.dtype, cache_shape) + ", got " +
                describe(cache.dtype, cache.shape));
  }
  const Shape table_shape = value(cos).shape;
  require(table_shape.size() == 2 && 2 * table_shape[1].size <= head_dim,
          "attention: expected cos [context, rotary_dim / 2] with rotary_dim <= " + std::to_string(head_dim) +
              ", got " + describe(value(cos).dtype, table_shape));
  require_constant(cos, Dtype::float32, table_shape, "attention's cos");
  require_constant(sin, Dtype::float32, table_shape, "attention's sin");
  const std::size_t context = table_shape[0].size;

  definition_.checks.push_back([=, name = start.name](const Frame& frame) {
    if (frame.dtypes[key_cache] != frame.dtypes[value_cache]) {
      throw std::invalid_argument("attention: the key and value caches must be of one type, got " +
                                  std::string(name_of(frame.dtypes[key_cache])) + " and " +
                                  std::string(name_of(frame.dtypes[value_cache])));
    }
    const std::int64_t first = *frame.get<const std::int64_t>(position);
    const std::size_t limit = std::min(context, frame.size_of(Symbol::P));
    const std::size_t rows = frame.size_of(Symbol::T);
    if (first < 0 || rows > limit || static_cast<std::size_t>(first) > limit - rows) {
      throw std::out_of_range("input '" + name + "': " + std::to_string(rows) + " rows from position " +
                              std::to_string(first) + " on do not fit: the cache holds " +
                              std::to_string(frame.size_of(Symbol::P)) + " positions, the rotary tables " +
                              std::to_string(context));
    }
  });

  const ValueId out = temporary(Dtype::float32, {rows_dimension(Symbol::T), fixed(num_heads * head_dim)});
  const auto arguments = [=](const Frame& frame) {
    return AttentionArgs{
        .qkv = frame.get<const float>(qkv),
        .cos = frame.get<const float>(cos),
        .sin = frame.get<const float>(sin),
        .key_cache = frame.get<void>(key_cache),
        .value_cache = frame.get<void>(value_cache),
        .cache_type = frame.dtypes[key_cache] == Dtype::float16 ? CacheType::float16 : CacheType::float32,
        .out = frame.get<float>(out),
        .rows = frame.size_of(Symbol::T),
        .position = static_cast<std::size_t>(*frame.get<const std::int64_t>(position)),
        .capacity = frame.size_of(Symbol::P),
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .rotary_dim = 2 * table_shape[1].size,
        .scale = scale};
  };
  definition_.scratch_floats = std::max(definition_.scratch_floats, attention_scratch_floats(head_dim));
  AttentionFunction* append = select_kernel(append_cache_f32_table()).function;
  AttentionFunction* attend = select_kernel(attend_f32_f32_cache_table()).function;
  const std::vector<ValueId> uses = {qkv, position, cos, sin, key_cache, value_cache, out};
  add_row_step(Symbol::T, uses, [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
    append(arguments(frame), begin, end, scratch);
  });
  add_stage([=](const Frame& frame) { return attend_items(arguments(frame)); }, 1, uses,
            [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
              attend(arguments(frame), begin, end, scratch);
            });
  return out;
}

}  // namespace chunkrt
