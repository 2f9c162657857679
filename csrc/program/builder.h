// Puts a program together. Operators (program/operators/operators.h) are functions on a builder: each checks
// its operands, makes values and appends the loops that compute them; its result is a value for the operators
// after it.
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

// Every function throws std::invalid_argument for what does not fit.
class ProgramBuilder {
 public:
  // `max_rows`: the most rows that T and R may count in a run, at least 1. `times`: what the program's runs
  // add the times of their steps to; without it they are not timed.
  ProgramBuilder(std::shared_ptr<ThreadPool> pool, std::size_t max_rows,
                 std::shared_ptr<StepTimes> times = nullptr);

  ValueId input(std::string name, Dtype dtype, Shape shape);
  // An input that is updated in place, float32. A cache of attention may in each run be float16 as well, int8
  // with columns for its scales, and for attention in bfloat16 uint16 in tiles: see
  // kernels/attention/attention.h.
  ValueId state(std::string name, Shape shape);
  // `data` is not copied; `owner` keeps it alive as long as the program.
  ValueId constant(const void* data, Dtype dtype, const std::vector<std::size_t>& shape,
                   std::shared_ptr<const void> owner);
  // Lets the caller receive an operator's result. A value can be one output.
  void output(std::string name, ValueId value);
  // The builder is spent afterwards.
  std::unique_ptr<Program> build();

  // The rest is what operators are made of. Their operands' values, and what they require of them:
  const Value& value(ValueId id) const;
  // The symbol and the width of a value float32 [symbol, width].
  Symbol rows_of(ValueId id, const std::string& what) const;
  std::size_t width_of(ValueId id) const { return value(id).shape.back().size; }
  void require_constant(ValueId id, Dtype dtype, const Shape& shape, const std::string& what) const;
  void require_state(ValueId id, const Shape& shape, const std::string& what) const;
  std::size_t max_rows() const { return definition_.max_rows; }

  // Values of their own: what a loop computes, and a constant float32 [size] that the program owns.
  ValueId temporary(Dtype dtype, Shape shape);
  ValueId float_rows(Symbol rows, std::size_t width);  // a temporary float32 [rows, width]
  ValueId floats(std::vector<float> values);

  // Makes a state one of keys or values, whose type is the caller's choice; also bfloat16, if it may be
  // tiled.
  void use_as_cache(ValueId state, bool may_be_tiled);
  // The floats of scratch that each thread has for a step, at least.
  void need_scratch(std::size_t floats);

  // What time counts as, by its name. A step's counts as its own name; one that does several kinds of work
  // tells them apart by Frame::lap.
  std::size_t part(const std::string& name);

  // `uses` are all values that is read or written. If one of them is a segment's own, the frame is that of a
  // segment: all others must be constants or have rows T, so that it has rows of its own in each.

  // What every run checks before anything is written.
  void add_check(const std::vector<ValueId>& uses, std::function<void(const Frame&)> look);
  // Appends a step over rows to the last loop if that is over the same rows, else to a new one.
  void add_row_step(Symbol rows, const std::string& name, const std::vector<ValueId>& uses, Compute compute);
  // Appends a loop of one step; `num_items` sees the same frame as that.
  void add_loop(std::function<std::size_t(const Frame&)> num_items, std::size_t piece_multiple,
                const std::string& name, const std::vector<ValueId>& uses, Compute compute);

  // What operators of a kind note of this program, so that it is computed once: there is one object of each
  // type, made when it is first asked for.
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
