// Builds a program. Operators (program/operators/operators.h) are functions on a builder. An operator checks
// its operands, creates values and appends the loops that compute these values; its result is an operand for
// later operators.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <typeindex>
#include <vector>

#include "program/program.h"

namespace chunkrt {

// Throws std::invalid_argument with the message unless the condition holds.
void require(bool condition, const std::string& message);

// Every function throws std::invalid_argument for operands that do not fit.
class ProgramBuilder {
 public:
  // `max_rows`: the largest T and R of a run, at least 1. `times` receives the times of the program's steps;
  // if it is nullptr, steps are not timed.
  ProgramBuilder(std::shared_ptr<ThreadPool> pool, std::size_t max_rows,
                 std::shared_ptr<StepTimes> times = nullptr);

  ValueId input(std::string name, Dtype dtype, Shape shape);
  // An input that is updated in place, float32. In each run, a cache of attention may instead be float16,
  // int8 with additional columns for its scales, or, for attention in bfloat16, uint16 in tiles: see
  // kernels/attention/attention.h.
  ValueId state(std::string name, Shape shape);
  // `data` is not copied; `owner` keeps it alive as long as the program.
  ValueId constant(const void* data, Dtype dtype, const std::vector<std::size_t>& shape,
                   std::shared_ptr<const void> owner);
  // Makes an operator's result an output. A value can be an output only once.
  void output(std::string name, ValueId value);
  // The builder cannot be used afterwards.
  std::unique_ptr<Program> build();

  // The remaining functions are for operators. These functions check requirements of operands:
  const Value& value(ValueId id) const;
  // Return the symbol and the width of a value float32 [symbol, width].
  Symbol rows_of(ValueId id, const std::string& what) const;
  std::size_t width_of(ValueId id) const { return value(id).shape.back().size; }
  void require_constant(ValueId id, Dtype dtype, const Shape& shape, const std::string& what) const;
  void require_state(ValueId id, const Shape& shape, const std::string& what) const;
  std::size_t max_rows() const { return definition_.max_rows; }

  // Create values: the result of a loop, and a constant float32 [size] that the program owns.
  ValueId temporary(Dtype dtype, Shape shape);
  ValueId float_rows(Symbol rows, std::size_t width);  // a temporary float32 [rows, width]
  ValueId floats(std::vector<float> values);

  // Marks a state as a cache of keys or values, whose type the caller chooses; this includes bfloat16 if it
  // may be tiled.
  void use_as_cache(ValueId state, bool may_be_tiled);
  // Requests at least the given number of floats of scratch for each thread in a step.
  void need_scratch(std::size_t floats);

  // Registers a part of a step's time by name. A step's time counts under its own name; a step with several
  // kinds of work separates them by Frame::lap.
  std::size_t part(const std::string& name);

  // `uses` are all values that the loop reads or writes. If one of these values belongs to a segment, the
  // frame is that of a segment. All other values must then be constants or have rows T, so that each segment
  // has its own rows of them.

  // A check that every run makes before it writes.
  void add_check(const std::vector<ValueId>& uses, std::function<void(const Frame&)> look);
  // Appends a step over rows to the last loop if that loop is over the same rows, otherwise to a new loop.
  void add_row_step(Symbol rows, const std::string& name, const std::vector<ValueId>& uses, Compute compute);
  // Appends a loop of one step; `num_items` receives the same frame as the step.
  void add_loop(std::function<std::size_t(const Frame&)> num_items, std::size_t piece_multiple,
                const std::string& name, const std::vector<ValueId>& uses, Compute compute);

  // State that operators of the same kind share in this program, so that it is computed only once. There is
  // one object of each type, created on first use.
  template <typename Notes>
  Notes& notes() {
    std::shared_ptr<void>& held = notes_[typeid(Notes)];
    if (!held) held = std::make_shared<Notes>();
    return *static_cast<Notes*>(held.get());
  }

 private:
  ValueId add_value(Value value);
  ValueId add_input(Value value);
  bool is_segmented(const std::vector<ValueId>& uses) const;
  Step make_step(const std::string& name, const std::vector<ValueId>& uses, Compute compute);
  void append(Step step);  // to the last loop

  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<StepTimes> times_;
  ProgramDefinition definition_;
  std::map<std::type_index, std::shared_ptr<void>> notes_;
  bool is_built_ = false;
};

}  // namespace chunkrt
