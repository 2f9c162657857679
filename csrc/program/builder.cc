#include "program/builder.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace chunkrt {
namespace {

// A size larger than any processor can address, but far enough below the maximum of std::size_t that small
// multiples of a value's sizes do not overflow.
constexpr std::size_t kMostBytes = std::size_t{1} << 48;

void require_room(const Value& value, std::size_t max_rows) {
  std::size_t bytes = bytes_of(value.dtype);
  for (const Dimension& dimension : value.shape) {
    const std::size_t size = counts_rows(dimension) ? max_rows : dimension.size;
    require(size <= kMostBytes / bytes, describe(value.dtype, value.shape) + " with up to " +
                                            std::to_string(max_rows) + " rows is more than " +
                                            std::to_string(kMostBytes) + " bytes");
    bytes *= std::max<std::size_t>(size, 1);
  }
}

}  // namespace

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

ProgramBuilder::ProgramBuilder(std::shared_ptr<ThreadPool> pool, std::size_t max_rows,
                               std::shared_ptr<StepTimes> times)
    : pool_(std::move(pool)), times_(std::move(times)) {
  require(max_rows >= 1, "a program needs room for at least 1 row, got max_rows 0");
  definition_.max_rows = max_rows;
}

ValueId ProgramBuilder::input(std::string name, Dtype dtype, Shape shape) {
  return add_input(
      {.kind = ValueKind::input, .name = std::move(name), .dtype = dtype, .shape = std::move(shape)});
}

ValueId ProgramBuilder::state(std::string name, Shape shape) {
  return add_input({.kind = ValueKind::state,
                    .name = std::move(name),
                    .dtype = Dtype::float32,
                    .shape = std::move(shape)});
}

ValueId ProgramBuilder::add_input(Value value) {
  const bool is_segments_own =
      value.kind == ValueKind::state || std::ranges::none_of(value.shape, counts_rows);
  if (is_segments_own) value.segment_place = definition_.segment_inputs.size();
  const ValueId id = add_value(std::move(value));
  definition_.inputs.push_back(id);
  (is_segments_own ? definition_.segment_inputs : definition_.chunk_inputs).push_back(id);
  return id;
}

ValueId ProgramBuilder::constant(const void* data, Dtype dtype, const std::vector<std::size_t>& shape,
                                 std::shared_ptr<const void> owner) {
  Shape dimensions;
  for (const std::size_t size : shape) dimensions.push_back({.symbol = {}, .size = size});
  return add_value({.kind = ValueKind::constant,
                    .dtype = dtype,
                    .shape = std::move(dimensions),
                    .data = data,
                    .owner = std::move(owner)});
}

void ProgramBuilder::output(std::string name, ValueId id) {
  require(value(id).kind == ValueKind::temporary,
          "output '" + name + "' is not the result of an operator, or is an output already; copy it first");
  Value& result = definition_.values[id];
  result.kind = ValueKind::output;
  result.name = std::move(name);
  definition_.outputs.push_back(id);
}

std::unique_ptr<Program> ProgramBuilder::build() {
  require(!definition_.outputs.empty(), "the program has no output");
  is_built_ = true;
  return std::make_unique<Program>(std::move(definition_), pool_, times_);
}

const Value& ProgramBuilder::value(ValueId id) const {
  require(!is_built_, "the program has been built; start another builder");
  require(id < definition_.values.size(), "there is no value " + std::to_string(id));
  return definition_.values[id];
}

ValueId ProgramBuilder::add_value(Value value) {
  require(!is_built_, "the program has been built; start another builder");
  require_room(value, definition_.max_rows);
  if (!value.shape.empty() && counts_rows(value.shape[0])) {
    value.bytes_of_row = bytes_of(value.dtype);
    for (std::size_t i = 1; i < value.shape.size(); ++i) value.bytes_of_row *= value.shape[i].size;
  }
  definition_.values.push_back(std::move(value));
  return definition_.values.size() - 1;
}

ValueId ProgramBuilder::floats(std::vector<float> values) {
  const auto owner = std::make_shared<const std::vector<float>>(std::move(values));
  return constant(owner->data(), Dtype::float32, {owner->size()}, owner);
}

ValueId ProgramBuilder::temporary(Dtype dtype, Shape shape) {
  const ValueId id = add_value({.kind = ValueKind::temporary, .dtype = dtype, .shape = std::move(shape)});
  definition_.values[id].first_loop = definition_.loops.size() + 1;  // until its first use
  return id;
}

ValueId ProgramBuilder::float_rows(Symbol rows, std::size_t width) {
  return temporary(Dtype::float32, {rows_dimension(rows), fixed(width)});
}

Symbol ProgramBuilder::rows_of(ValueId id, const std::string& what) const {
  const Value& operand = value(id);
  const bool fits = operand.dtype == Dtype::float32 && operand.shape.size() == 2 &&
                    counts_rows(operand.shape[0]) && !operand.shape[1].symbol && operand.shape[1].size > 0;
  require(fits, std::string(what) + ": expected float32 [T, width] or [R, width], got " +
                    describe(operand.dtype, operand.shape));
  return *operand.shape[0].symbol;
}

void ProgramBuilder::require_constant(ValueId id, Dtype dtype, const Shape& shape,
                                      const std::string& what) const {
  const Value& operand = value(id);
  require(operand.kind == ValueKind::constant && operand.dtype == dtype && operand.shape == shape,
          what + ": expected a constant " + describe(dtype, shape) + ", got " +
              describe(operand.dtype, operand.shape));
}

void ProgramBuilder::require_state(ValueId id, const Shape& shape, const std::string& what) const {
  const Value& operand = value(id);
  require(operand.kind == ValueKind::state && operand.shape == shape,
          what + ": expected a state " + describe(operand.dtype, shape) + ", got " +
              describe(operand.dtype, operand.shape));
}

void ProgramBuilder::use_as_cache(ValueId state, bool may_be_tiled) {
  definition_.values[state].is_cache = true;
  definition_.values[state].may_be_tiled = may_be_tiled;
}

void ProgramBuilder::need_scratch(std::size_t floats) {
  definition_.scratch_floats = std::max(definition_.scratch_floats, floats);
}

bool ProgramBuilder::is_segmented(const std::vector<ValueId>& uses) const {
  const auto is_own = [this](ValueId id) { return value(id).segment_place.has_value(); };
  if (std::ranges::none_of(uses, is_own)) return false;
  for (const ValueId id : uses) {
    const Value& used = value(id);
    if (used.segment_place || used.kind == ValueKind::constant) continue;
    const auto is_fixed = [](const Dimension& dimension) { return !dimension.symbol; };
    require(!used.shape.empty() && used.shape[0].symbol == Symbol::T &&
                std::ranges::all_of(used.shape.begin() + 1, used.shape.end(), is_fixed),
            "a step that runs by segment cannot use rows of " + describe(used.dtype, used.shape) +
                "; the first dimension must be T, and no other a symbol");
  }
  return true;
}

std::size_t ProgramBuilder::part(const std::string& name) {
  require(!name.empty(), "a step has a name");
  std::vector<std::string>& parts = definition_.parts;
  const auto found = std::ranges::find(parts, name);
  const auto place = static_cast<std::size_t>(found - parts.begin());
  if (found == parts.end()) parts.push_back(name);
  return place;
}

void ProgramBuilder::add_check(const std::vector<ValueId>& uses, std::function<void(const Frame&)> look) {
  definition_.checks.push_back({.look = std::move(look), .uses = uses, .is_segmented = is_segmented(uses)});
}

Step ProgramBuilder::make_step(const std::string& name, const std::vector<ValueId>& uses, Compute compute) {
  return {
      .part = part(name), .compute = std::move(compute), .uses = uses, .is_segmented = is_segmented(uses)};
}

void ProgramBuilder::append(Step step) {
  const std::size_t last = definition_.loops.size() - 1;
  for (const ValueId id : step.uses) {
    Value& used = definition_.values[id];
    used.first_loop = std::min(used.first_loop, last);
    used.last_loop = std::max(used.last_loop, last);
  }
  definition_.loops.back().steps.push_back(std::move(step));
}

void ProgramBuilder::add_row_step(Symbol rows, const std::string& name, const std::vector<ValueId>& uses,
                                  Compute compute) {
  Step step = make_step(name, uses, std::move(compute));
  require(rows == Symbol::T || !step.is_segmented, "segments have rows T of their own, not R");
  if (definition_.loops.empty() || definition_.loops.back().rows != rows) {
    const auto num_rows = [rows](const Frame& frame) { return frame.size_of(rows); };
    definition_.loops.push_back({.num_items = num_rows, .piece_multiple = 1, .rows = rows, .steps = {}});
  }
  append(std::move(step));
}

void ProgramBuilder::add_loop(std::function<std::size_t(const Frame&)> num_items, std::size_t piece_multiple,
                              const std::string& name, const std::vector<ValueId>& uses, Compute compute) {
  Step step = make_step(name, uses, std::move(compute));
  definition_.loops.push_back(
      {.num_items = std::move(num_items), .piece_multiple = piece_multiple, .rows = {}, .steps = {}});
  append(std::move(step));
}

}  // namespace chunkrt
