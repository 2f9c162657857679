#include "program/program.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "program/sizes.h"

namespace chunkrt {
namespace {

constexpr std::size_t kAlignment = MemoryPool::kAlignment;
constexpr std::size_t kPiecesPerThread = 4;  // so that a slower core takes fewer
constexpr std::size_t kRowsAtOnce =
    2;  // through all steps of a loop, so that they stay in the first-level cache

std::string describe(const TensorView& view) {
  std::string text = view.dtype + " [";
  for (std::size_t i = 0; i < view.shape.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(view.shape[i]);
  return text + "]";
}

// What a run may give: a cache as it was declared, in float16, or in int8 with each row's scale.
bool match_dtype(const Value& value, const TensorView& view) {
  return view.dtype == name_of(value.dtype) ||
         (value.is_cache && (view.dtype == name_of(Dtype::float16) || view.dtype == name_of(Dtype::int8)));
}

Shape shape_in(const Value& value, Dtype dtype) {
  Shape shape = value.shape;
  if (value.is_cache && dtype == Dtype::int8) shape.back().size += sizeof(float);
  return shape;
}

// Whether the view has the shape's rank, fixed sizes, and the symbols' sizes as far as they are known; learns
// others. Only R may be 0: a chunk whose logits nobody wants.
bool match_shape(const Shape& shape, const TensorView& view, Sizes& sizes) {
  if (view.shape.size() != shape.size()) return false;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    const Dimension& dimension = shape[i];
    std::size_t expected = dimension.size;
    if (dimension.symbol) {
      std::optional<std::size_t>& size = sizes[static_cast<std::size_t>(*dimension.symbol)];
      if (!size) size = view.shape[i];
      expected = *size;
      if (expected == 0 && *dimension.symbol != Symbol::R) return false;
    }
    if (view.shape[i] != expected) return false;
  }
  return true;
}

// "float32 [T, 576] with T = 32"
std::string expectation(const Value& value, const Sizes& sizes) {
  std::string known;
  for (const Dimension& dimension : value.shape) {
    if (!dimension.symbol) continue;
    const std::size_t size = sizes[static_cast<std::size_t>(*dimension.symbol)].value_or(0);
    if (size == 0) continue;
    known += (known.empty() ? " with " : ", ") + std::string(name_of(*dimension.symbol)) + " = " +
             std::to_string(size);
  }
  const std::string others =
      value.is_cache ? describe(Dtype::int8, shape_in(value, Dtype::int8)) + ", float16 or " : "";
  return others + describe(value.dtype, value.shape) + known;
}

}  // namespace

// What one run needs for itself.
struct Program::Workspace {
  std::byte* scratch;     // of every member
  std::byte* row_locals;  // of every member
  std::vector<void*> data;
  std::vector<Dtype> dtypes;
};

Program::Program(ProgramDefinition definition, std::shared_ptr<ThreadPool> pool)
    : definition_(std::move(definition)), pool_(std::move(pool)) {
  row_local_bytes_ = lay_out_rows();
  scratch_bytes_ = round_up(checked_multiply(definition_.scratch_floats, sizeof(float)), kAlignment);
  lay_out_arena();
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
    std::size_t row_bytes = bytes_of(value.dtype);
    for (std::size_t i = 1; i < value.shape.size(); ++i)
      row_bytes = checked_multiply(row_bytes, value.shape[i].size);
    std::size_t& offset = used[value.first_loop];
    row_locals_[value.first_loop].push_back({.value = id, .row_bytes = row_bytes, .offset = offset});
    offset = round_up(checked_add(offset, checked_multiply(kRowsAtOnce, row_bytes)), kAlignment);
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
    // The lowest gap among those that live at the same time; `placed` is sorted by offset.
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

Program::Workspace Program::make_workspace(std::byte* memory) const {
  const std::size_t members = pool_->budget();
  Workspace workspace = {.scratch = memory + arena_bytes_,
                         .row_locals = memory + arena_bytes_ + scratch_bytes_ * members,
                         .data = {},
                         .dtypes = {}};
  for (const Value& value : definition_.values) {
    void* data = const_cast<void*>(value.data);  // steps only read constants
    if (value.kind == ValueKind::temporary) data = memory + value.arena_offset;
    workspace.data.push_back(data);
    workspace.dtypes.push_back(value.dtype);
  }
  return workspace;
}

void Program::bind(std::span<const TensorView> views, const std::vector<ValueId>& ids, const char* what,
                   Workspace& workspace, Sizes& sizes) const {
  if (views.size() != ids.size()) {
    throw std::invalid_argument("expected " + std::to_string(ids.size()) + " " + what + "s, got " +
                                std::to_string(views.size()));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Value& value = definition_.values[ids[i]];
    const TensorView& view = views[i];
    const std::string name = std::string(what) + " '" + value.name + "'";
    const Dtype dtype = match_dtype(value, view) ? dtype_named(view.dtype) : value.dtype;
    if (view.dtype != name_of(dtype) || !match_shape(shape_in(value, dtype), view, sizes)) {
      throw std::invalid_argument(name + ": expected " + expectation(value, sizes) + ", got " +
                                  describe(view));
    }
    if (!view.is_contiguous) {
      throw std::invalid_argument(name +
                                  " is not contiguous row-major memory; pass numpy.ascontiguousarray of it");
    }
    if (value.kind != ValueKind::input && !view.is_writeable) {
      throw std::invalid_argument(name + " is written to, but read-only");
    }
    workspace.data[ids[i]] = view.data;
    workspace.dtypes[ids[i]] = dtype;
  }
}

void Program::run(std::span<const TensorView> inputs, std::span<const TensorView> outputs) {
  ThreadPool::Team team(*pool_);  // who waits for a turn holds no memory
  const MemoryPool::Block memory = pool_->memory().borrow(run_bytes_);
  Workspace workspace = make_workspace(memory.get());
  Frame frame{.data = workspace.data, .dtypes = workspace.dtypes};
  bind(inputs, definition_.inputs, "input", workspace, frame.sizes);
  bind(outputs, definition_.outputs, "output", workspace, frame.sizes);
  for (const Symbol symbol : {Symbol::T, Symbol::R}) {
    if (frame.size_of(symbol) > definition_.max_rows) {
      throw std::invalid_argument(
          std::string(name_of(symbol)) + " = " + std::to_string(frame.size_of(symbol)) +
          " rows, but the program was compiled for at most " + std::to_string(definition_.max_rows));
    }
  }
  for (const Check& check : definition_.checks) check(frame);
  std::vector data_of_members(pool_->budget(), workspace.data);  // the same, but for rows in work

  const std::size_t num_pieces = pool_->budget() * kPiecesPerThread;
  for (std::size_t index = 0; index < definition_.loops.size(); ++index) {
    const Loop& loop = definition_.loops[index];
    const auto body = [&](std::size_t begin, std::size_t end, std::size_t member) {
      const std::size_t at_once = loop.steps.size() > 1 ? kRowsAtOnce : end - begin;
      std::vector<void*>& data = data_of_members[member];
      const Frame own = {.data = data, .dtypes = frame.dtypes, .sizes = frame.sizes};
      std::byte* rows = workspace.row_locals + member * row_local_bytes_;
      float* scratch = reinterpret_cast<float*>(workspace.scratch + member * scratch_bytes_);
      for (; begin < end; begin += at_once) {
        // Where row 0 would be, if there were room for it.
        for (const RowLocal& local : row_locals_[index]) {
          const auto place = reinterpret_cast<std::uintptr_t>(rows + local.offset) - begin * local.row_bytes;
          data[local.value] = reinterpret_cast<void*>(place);
        }
        const std::size_t last = std::min(begin + at_once, end);
        for (const Step& step : loop.steps) step(own, begin, last, scratch);
      }
    };
    const std::size_t num_items = loop.num_items(frame);
    const std::size_t fair_share = std::max<std::size_t>(ceil_divide(num_items, num_pieces), 1);
    team.parallel_for(num_items, round_up(fair_share, loop.piece_multiple), std::cref(body));
  }
}

}  // namespace chunkrt
