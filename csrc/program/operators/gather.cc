// gather, add_positions and columns: selection of rows and columns.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels/dispatch.h"
#include "program/operators/operators.h"

namespace chunkrt {
namespace {

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

ValueId gather(ProgramBuilder& builder, ValueId table, ValueId indices, std::optional<TableShare> share) {
  const Value& source = builder.value(table);
  const Value& rows = builder.value(indices);
  require(rows.kind == ValueKind::input && rows.dtype == Dtype::int64 && rows.shape.size() == 1 &&
              counts_rows(rows.shape[0]),
          "gather: expected the indices to be an input int64 [T] or [R], got " +
              describe(rows.dtype, rows.shape));
  const bool is_constant = source.kind == ValueKind::constant && source.shape.size() == 2;
  if (!is_constant) builder.rows_of(table, "gather's table");
  require(is_constant || !share, "gather: only a constant table can be a share");
  const bool is_half = is_constant && source.dtype == Dtype::float16;
  require(is_half || source.dtype == Dtype::float32,
          "gather: expected a float32 or float16 table, got " + describe(source.dtype, source.shape));

  const Symbol symbol = *rows.shape[0].symbol;
  const Dimension height = source.shape[0];
  const std::size_t width = source.shape[1].size;
  builder.add_check({indices}, [=, name = rows.name](const Frame& frame) {
    const std::size_t limit = share           ? share->all_rows
                              : height.symbol ? frame.size_of(*height.symbol)
                                              : height.size;
    check_indices(name, frame.get<const std::int64_t>(indices), frame.size_of(symbol), limit);
  });

  const ValueId out = builder.float_rows(symbol, width);
  WidenFunction* widen = select_kernel(widen_f32_f16).function;
  const std::size_t first = share ? share->first : 0;
  Compute pick = [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
    const std::int64_t* index = frame.get<const std::int64_t>(indices);
    for (std::size_t row = begin; row < end; ++row) {
      float* target = frame.get<float>(out) + row * width;
      const std::size_t picked = static_cast<std::size_t>(index[row]) - first;  // wraps below the first row
      if (share && picked >= height.size) {
        std::fill_n(target, width, 0.0f);
        continue;
      }
      const std::size_t offset = picked * width;
      if (is_half) {
        widen(frame.get<const std::uint16_t>(table) + offset, target, width);
      } else {
        std::memcpy(target, frame.get<const float>(table) + offset, width * sizeof(float));
      }
    }
  };
  if (is_constant) {
    builder.add_row_step(symbol, "gather", {table, indices, out}, std::move(pick));
  } else {  // a separate loop, because the last loop may still compute other rows of the table
    builder.add_loop([symbol](const Frame& frame) { return frame.size_of(symbol); }, 1, "gather",
                     {table, indices, out}, std::move(pick));
  }
  return out;
}

ValueId add_positions(ProgramBuilder& builder, ValueId input, ValueId table, ValueId position) {
  const Symbol symbol = builder.rows_of(input, "add_positions");
  const std::size_t width = builder.width_of(input);
  const Value& rows = builder.value(table);
  const Value& given = builder.value(position);
  require(
      symbol == Symbol::T && given.kind == ValueKind::input && given.dtype == Dtype::int64 &&
          given.shape == Shape{fixed(1)},
      "add_positions: expected rows T and a position int64 [1], got " + describe(given.dtype, given.shape));
  require(rows.kind == ValueKind::constant && rows.dtype == Dtype::float32 && rows.shape.size() == 2 &&
              rows.shape[1] == fixed(width),
          "add_positions: expected a constant float32 [positions, " + std::to_string(width) + "], got " +
              describe(rows.dtype, rows.shape));
  const std::size_t num_positions = rows.shape[0].size;
  builder.add_check({position}, [=, name = given.name](const Frame& frame) {
    const std::int64_t first = *frame.get<const std::int64_t>(position);
    const std::size_t count = frame.size_of(symbol);
    if (first < 0 || count > num_positions || static_cast<std::size_t>(first) > num_positions - count) {
      throw std::out_of_range("input '" + name + "': " + std::to_string(count) + " rows from position " +
                              std::to_string(first) + " on are not inside the " +
                              std::to_string(num_positions) + " positions of the table");
    }
  });
  const ValueId out = builder.float_rows(symbol, width);
  BinaryFunction* add = select_kernel(add_f32_f32_f32).function;
  builder.add_row_step(symbol, "add_positions", {input, table, position, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         const auto first =
                             static_cast<std::size_t>(*frame.get<const std::int64_t>(position));
                         add(frame.get<const float>(input) + begin * width,
                             frame.get<const float>(table) + (first + begin) * width,
                             frame.get<float>(out) + begin * width, (end - begin) * width);
                       });
  return out;
}

ValueId columns(ProgramBuilder& builder, ValueId input, std::size_t begin_column, std::size_t width) {
  const Symbol symbol = builder.rows_of(input, "columns");
  const std::size_t input_width = builder.width_of(input);
  require(width >= 1 && width <= input_width && begin_column <= input_width - width,
          "columns: " + std::to_string(width) + " columns from " + std::to_string(begin_column) +
              " on are not inside " + describe(Dtype::float32, builder.value(input).shape));
  const ValueId out = builder.float_rows(symbol, width);
  builder.add_row_step(
      symbol, "columns", {input, out}, [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
        for (std::size_t row = begin; row < end; ++row) {
          const float* source = frame.get<const float>(input) + row * input_width + begin_column;
          std::memcpy(frame.get<float>(out) + row * width, source, width * sizeof(float));
        }
      });
  return out;
}

ValueId concat(ProgramBuilder& builder, const std::vector<ValueId>& inputs) {
  require(!inputs.empty(), "concat: expected at least one input");
  const Symbol symbol = builder.rows_of(inputs.front(), "concat");
  std::vector<std::size_t> widths;
  std::size_t width = 0;
  for (const ValueId input : inputs) {
    require(builder.rows_of(input, "concat") == symbol, "concat: expected the same rows in all inputs");
    widths.push_back(builder.width_of(input));
    width += widths.back();
  }
  const ValueId out = builder.float_rows(symbol, width);
  std::vector<ValueId> used = inputs;
  used.push_back(out);
  builder.add_row_step(symbol, "concat", used,
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         for (std::size_t row = begin; row < end; ++row) {
                           float* target = frame.get<float>(out) + row * width;
                           for (std::size_t i = 0; i < inputs.size(); ++i) {
                             const float* source = frame.get<const float>(inputs[i]) + row * widths[i];
                             target = std::copy_n(source, widths[i], target);
                           }
                         }
                       });
  return out;
}

ValueId pick_columns(ProgramBuilder& builder, ValueId input,
                     const std::vector<std::pair<std::size_t, std::size_t>>& ranges) {
  const Symbol symbol = builder.rows_of(input, "pick_columns");
  const std::size_t input_width = builder.width_of(input);
  std::size_t width = 0;
  for (const auto& [begin, end] : ranges) {
    require(begin < end && (begin >= input_width || end <= input_width),
            "pick_columns: expected ranges inside or outside of " + std::to_string(input_width) + " columns");
    width += end - begin;
  }
  require(width >= 1, "pick_columns: expected at least one column");
  const ValueId out = builder.float_rows(symbol, width);
  builder.add_row_step(symbol, "pick_columns", {input, out},
                       [=](const Frame& frame, std::size_t begin_row, std::size_t end_row, float*) {
                         for (std::size_t row = begin_row; row < end_row; ++row) {
                           const float* source = frame.get<const float>(input) + row * input_width;
                           float* target = frame.get<float>(out) + row * width;
                           for (const auto& [begin, end] : ranges) {
                             if (begin < input_width) {
                               std::copy(source + begin, source + end, target);
                             } else {
                               std::fill_n(target, end - begin, 0.0f);
                             }
                             target += end - begin;
                           }
                         }
                       });
  return out;
}

}  // namespace chunkrt
