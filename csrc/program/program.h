// A program: a subgraph as loops of kernel calls over numbered values, compiled once and run in one call.
//
// Weights are constants, used where they lie. Temporaries share an arena, laid out once by their lifetimes. A
// loop goes over independent items (rows, blocks of columns, ...) that a team's threads divide among
// themselves; row-wise steps that follow each other share one loop, so that a row stays in one thread's
// cache between them. Temporaries that no other loop reads have memory for the few rows in work alone.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "program/value.h"
#include "thread_pool.h"

namespace chunkrt {

// One run's buffers and sizes, as the steps see them.
struct Frame {
  std::span<void* const> data;    // by ValueId
  std::span<const Dtype> dtypes;  // by ValueId; a cache's is the caller's choice
  Sizes sizes{};

  std::size_t size_of(Symbol symbol) const { return sizes[static_cast<std::size_t>(symbol)].value_or(0); }

  template <typename T>
  T* get(ValueId value) const {
    return static_cast<T*>(data[value]);
  }
};

// Computes the items [begin, end) of its loop. `scratch` is the thread's own.
using Step = std::function<void(const Frame& frame, std::size_t begin, std::size_t end, float* scratch)>;

struct Loop {
  std::function<std::size_t(const Frame&)> num_items;
  std::size_t piece_multiple = 1;  // pieces are multiples of it, for kernels that are best at so many items
  std::optional<Symbol> rows;      // set if the items are rows
  std::vector<Step> steps;
};

// Looks at the inputs before anything is written; throws if they cannot be computed with.
using Check = std::function<void(const Frame&)>;

// What a ProgramBuilder has put together.
struct ProgramDefinition {
  std::vector<Value> values;
  std::vector<ValueId> inputs;  // states included, in the order of their declaration
  std::vector<ValueId> outputs;
  std::vector<Loop> loops;
  std::vector<Check> checks;
  std::size_t max_rows = 0;        // the most that T and R may be
  std::size_t scratch_floats = 0;  // a thread's
};

class Program {
 public:
  Program(ProgramDefinition definition, std::shared_ptr<ThreadPool> pool);
  ~Program();

  // Computes the outputs; states are updated in place. May be called from several threads at once.
  // Throws std::invalid_argument if a tensor is not what was declared, std::out_of_range if an index is out
  // of range; then no output and no state has been touched.
  void run(std::span<const TensorView> inputs, std::span<const TensorView> outputs);

  // Bytes of the temporaries that loops share; scratch and each thread's rows in work come on top.
  std::size_t arena_bytes() const { return arena_bytes_; }
  std::size_t num_loops() const { return definition_.loops.size(); }

 private:
  struct Workspace;

  // A temporary of one loop's rows. A thread has room for those that it works on.
  struct RowLocal {
    ValueId value;
    std::size_t row_bytes;
    std::size_t offset;  // into the thread's memory
  };

  void lay_out_arena();
  std::size_t lay_out_rows();
  Workspace make_workspace(std::byte* memory) const;
  void bind(std::span<const TensorView> views, const std::vector<ValueId>& ids, const char* what,
            Workspace& workspace, Sizes& sizes) const;

  ProgramDefinition definition_;
  std::shared_ptr<ThreadPool> pool_;
  std::size_t arena_bytes_ = 0;
  std::vector<std::vector<RowLocal>> row_locals_;  // by loop
  std::size_t row_local_bytes_ = 0;                // a thread's
  std::size_t scratch_bytes_ = 0;                  // a thread's
  std::size_t run_bytes_ = 0;                      // all that a run borrows
};

}  // namespace chunkrt
