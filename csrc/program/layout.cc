// Placement of a program's temporaries: in the arena by their lifetimes, or with a thread's rows in work.
#include <algorithm>
#include <utility>

#include "program/program.h"
#include "program/sizes.h"

namespace chunkrt {
namespace {

constexpr std::size_t kAlignment = MemoryPool::kAlignment;

// Smaller constants are not weights.
constexpr std::size_t kLeastBytesAhead = 64 * 1024;

}  // namespace

Program::Program(ProgramDefinition definition, std::shared_ptr<ThreadPool> pool,
                 std::shared_ptr<StepTimes> times)
    : definition_(std::move(definition)), pool_(std::move(pool)), times_(std::move(times)) {
  row_local_bytes_ = lay_out_rows();
  scratch_bytes_ = round_up(checked_multiply(definition_.scratch_floats, sizeof(float)), kAlignment);
  lay_out_arena();
  look_ahead();
  const std::size_t own_bytes = checked_add(scratch_bytes_, row_local_bytes_);
  run_bytes_ = checked_add(arena_bytes_, checked_multiply(own_bytes, pool_->budget()));
}

Program::~Program() = default;

std::size_t Program::lay_out_rows() {
  row_locals_.resize(definition_.loops.size());
  std::size_t most = 0;
  std::vector<std::size_t> used(definition_.loops.size());
  for (ValueId id = 0; id < definition_.values.size(); ++id) {
    Value& value = definition_.values[id];
    if (value.kind != ValueKind::temporary || value.first_loop != value.last_loop) continue;
    const Loop& loop = definition_.loops[value.first_loop];
    if (!loop.rows || loop.steps.size() < 2 || value.shape[0].symbol != loop.rows) continue;
    std::size_t& offset = used[value.first_loop];
    row_locals_[value.first_loop].push_back({.value = id, .row_bytes = value.bytes_of_row, .offset = offset});
    offset = round_up(checked_add(offset, checked_multiply(kRowsAtOnce, value.bytes_of_row)), kAlignment);
    most = std::max(most, offset);
    value.is_row_local = true;
  }
  return most;
}

void Program::lay_out_arena() {
  struct Placed {
    const Value* value;
    std::size_t end;
  };
  std::vector<Placed> placed;
  for (Value& value : definition_.values) {
    if (value.kind != ValueKind::temporary || value.is_row_local) continue;
    std::size_t bytes = bytes_of(value.dtype);
    for (const Dimension& dimension : value.shape) {
      bytes = checked_multiply(bytes, dimension.symbol ? definition_.max_rows : dimension.size);
    }
    // Returns the offset of the lowest gap between values with overlapping lifetimes; `placed` is sorted by
    // offset.
    std::size_t offset = 0;
    for (const Placed& other : placed) {
      const bool live_together =
          other.value->first_loop <= value.last_loop && value.first_loop <= other.value->last_loop;
      if (live_together && offset < other.end) {
        if (checked_add(offset, bytes) <= other.value->arena_offset) break;
        offset = round_up(other.end, kAlignment);
      }
    }
    value.arena_offset = offset;
    const auto position =
        std::ranges::upper_bound(placed, offset, {}, [](const Placed& p) { return p.value->arena_offset; });
    const std::size_t end = checked_add(offset, bytes);
    placed.insert(position, Placed{&value, end});
    arena_bytes_ = std::max(arena_bytes_, round_up(end, kAlignment));
  }
}

// Finds the weights that each loop's successors read first. The weights of a loop are its largest constant.
void Program::look_ahead() {
  upcoming_.resize(definition_.loops.size());
  ThreadPool::Upcoming next;
  for (std::size_t turn = 0; turn < 2; ++turn) {  // the first loop follows the last one
    for (std::size_t index = definition_.loops.size(); index-- > 0;) {
      upcoming_[index] = next;
      ThreadPool::Upcoming largest = {.data = nullptr, .bytes = kLeastBytesAhead};
      for (const Step& step : definition_.loops[index].steps) {
        for (const ValueId id : step.uses) {
          const Value& value = definition_.values[id];
          if (value.kind != ValueKind::constant) continue;
          std::size_t bytes = bytes_of(value.dtype);
          for (const Dimension& dimension : value.shape) bytes *= dimension.size;
          if (bytes > largest.bytes) largest = {static_cast<const std::byte*>(value.data), bytes};
        }
      }
      if (largest.data) next = largest;
    }
  }
}

}  // namespace chunkrt
