// A program: a subgraph in the form of loops of kernel calls over numbered values. It is compiled once and
// run in one call.
//
// Weights are constants that are used in place. Temporaries share an arena that is laid out once by their
// lifetimes. A loop iterates over independent items (rows, blocks of columns, ...), which are divided among
// the threads of a team. Consecutive row-wise steps share one loop, so that a row stays in one thread's cache
// between the steps. Temporaries that no other loop reads have memory only for the few rows in work.
//
// The rows of a chunk may belong to several sequences; the rows of each sequence form a contiguous segment.
// States, and inputs without rows such as a position, belong to a segment. A step that uses such an operand
// processes one segment at a time, as if the segment were alone; one loop still iterates over the items of
// all segments. Other steps process the complete chunk.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "program/step_times.h"
#include "program/value.h"
#include "thread_pool.h"

namespace chunkrt {

// The buffers and sizes of a run that are passed to a step: those of the chunk, or of one segment.
struct Frame {
  std::span<void* const> data;    // by ValueId
  std::span<const Dtype> dtypes;  // by ValueId; the caller chooses that of a cache
  Sizes sizes{};
  Stopwatch* watch = nullptr;  // the thread's, if the run is timed

  std::size_t size_of(Symbol symbol) const { return sizes[static_cast<std::size_t>(symbol)].value_or(0); }

  template <typename T>
  T* get(ValueId value) const {
    return static_cast<T*>(data[value]);
  }

  // Attributes the time since the start of the step, or since its last lap, to a part: see
  // ProgramBuilder::part.
  void lap(std::size_t part) const {
    if (watch) watch->lap(part);
  }
};

// Computes the items [begin, end) of the step's loop. Each thread has separate `scratch`. The functions of
// program/operators/ pass such a function to ProgramBuilder::add_loop or add_row_step.
using Compute = std::function<void(const Frame& frame, std::size_t begin, std::size_t end, float* scratch)>;

struct Step {
  std::size_t part;  // name under which its time counts
  Compute compute;
  std::vector<ValueId> uses;  // all values that it reads or writes
  bool is_segmented;          // the frame is that of a segment, and items are numbered within the segment
};

struct Loop {
  std::function<std::size_t(const Frame&)> num_items;  // rows of a segment, if the step is segmented
  // pieces are multiples of this number, for kernels that are fastest at such multiples
  std::size_t piece_multiple = 1;
  std::optional<Symbol> rows;  // set if the items are rows
  std::vector<Step> steps;
};

// Checks the inputs before any writes; throws if they are invalid.
struct Check {
  std::function<void(const Frame&)> look;
  std::vector<ValueId> uses;
  bool is_segmented;
};

// The result of a ProgramBuilder.
struct ProgramDefinition {
  std::vector<Value> values;
  std::vector<ValueId> inputs;          // in the order of their declaration, including states
  std::vector<ValueId> chunk_inputs;    // the inputs that have rows
  std::vector<ValueId> segment_inputs;  // the inputs without rows
  std::vector<ValueId> outputs;
  std::vector<Loop> loops;
  std::vector<Check> checks;
  std::vector<std::string> parts = {"between_steps"};  // names, by part
  std::size_t max_rows = 0;                            // the largest T and R
  std::size_t scratch_floats = 0;                      // for each thread
};

// Operands of one segment in a run.
struct SegmentViews {
  std::size_t num_rows;
  std::vector<TensorView> inputs;  // states, and inputs without rows, in the order of their declaration
};

class Program {
 public:
  // `times` receives the times of runs; nullptr disables timing.
  Program(ProgramDefinition definition, std::shared_ptr<ThreadPool> pool, std::shared_ptr<StepTimes> times);
  ~Program();

  // Computes the outputs; states are updated in place. May be called by several threads at once. Throws
  // std::invalid_argument if a tensor does not match its declaration, and std::out_of_range if an index is
  // out of range; in both cases all outputs and states are unchanged.
  void run(std::span<const TensorView> inputs, std::span<const TensorView> outputs);
  // Computes a chunk of several segments, each of at least one row. The results are bit-identical to those of
  // separate runs. `inputs` are the inputs that have rows; like the outputs, they belong to the complete
  // chunk. Also throws std::invalid_argument if the numbers of rows of the segments do not add up to T, or if
  // two segments share the memory of a state.
  void run_segments(std::span<const TensorView> inputs, std::span<const TensorView> outputs,
                    std::span<const SegmentViews> segments);

  // Number of bytes of the temporaries that loops share, without scratch and without the threads' rows in
  // work.
  std::size_t arena_bytes() const { return arena_bytes_; }
  std::size_t num_loops() const { return definition_.loops.size(); }
  // Names of the steps, by loop.
  std::vector<std::vector<std::string>> step_names() const;

 private:
  struct SegmentInputs;
  struct Segment;
  struct Chunk;
  struct Member;

  // Number of rows that pass through all steps of a loop together, so that they stay in the first-level
  // cache.
  static constexpr std::size_t kRowsAtOnce = 2;

  // A temporary that only one loop uses. Each thread has room for its rows in work.
  struct RowLocal {
    ValueId value;
    std::size_t row_bytes;
    std::size_t offset;  // offset in the thread's memory
  };

  void lay_out_arena();
  std::size_t lay_out_rows();
  void look_ahead();
  void execute(std::span<const TensorView* const> inputs, std::span<const TensorView> outputs,
               std::span<const SegmentInputs> segments);
  Chunk make_chunk(std::byte* memory) const;
  Dtype bind(const TensorView& view, ValueId id, const char* what, Sizes& sizes) const;
  void bind_chunk(std::span<const TensorView* const> inputs, std::span<const TensorView> outputs,
                  Chunk& chunk) const;
  void bind_segments(std::span<const SegmentInputs> segments, Chunk& chunk) const;
  void check_states_apart(std::span<const SegmentInputs> segments) const;
  std::vector<Member> make_members(const Chunk& chunk, std::span<Stopwatch> watches) const;
  Frame enter(const Chunk& chunk, std::size_t index, const std::vector<ValueId>& uses, Member& member) const;
  void check(const Chunk& chunk, Member& member) const;
  std::size_t number_items(const Loop& loop, Chunk& chunk, Member& member) const;
  void compute(std::size_t loop_index, std::size_t begin, std::size_t end, const Chunk& chunk,
               Member& member) const;

  ProgramDefinition definition_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<StepTimes> times_;
  std::size_t arena_bytes_ = 0;
  std::vector<std::vector<RowLocal>> row_locals_;  // by loop
  std::vector<ThreadPool::Upcoming> upcoming_;     // by loop: the weights of the next loop that has some
  std::size_t row_local_bytes_ = 0;                // for each thread
  std::size_t scratch_bytes_ = 0;                  // for each thread
  std::size_t run_bytes_ = 0;                      // total size that a run borrows
};

}  // namespace chunkrt
