#include "program/program.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/attention/attention.h"
#include "program/sizes.h"

namespace chunkrt {
namespace {

constexpr std::size_t kPiecesPerThread = 4;  // several pieces per thread, so that a slower core takes fewer

std::string describe(const TensorView& view) {
  std::string text = view.dtype + " [";
  for (std::size_t i = 0; i < view.shape.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(view.shape[i]);
  return text + "]";
}

// Cache types of a run: as declared, in float16, in int8 with the scales of each row, or in tiles.
bool match_dtype(const Value& value, const TensorView& view) {
  return view.dtype == name_of(value.dtype) ||
         (value.is_cache && (view.dtype == name_of(Dtype::float16) || view.dtype == name_of(Dtype::int8))) ||
         (value.may_be_tiled && view.dtype == name_of(Dtype::uint16));
}

Shape shape_in(const Value& value, Dtype dtype) {
  Shape shape = value.shape;
  if (value.is_cache && dtype == Dtype::int8) {
    shape.back().size = cache_row_bytes(CacheType::int8, shape.back().size);
  }
  if (value.is_cache && dtype == Dtype::uint16) shape.back().size = tiled_depth(shape.back().size);
  return shape;
}

// Returns true if the view has the rank and the fixed sizes of the shape, and the sizes of the symbols that
// are already known; sets the sizes of the other symbols. Only R may be 0, for a chunk without logits.
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
  std::string others;
  if (value.may_be_tiled) others += describe(Dtype::uint16, shape_in(value, Dtype::uint16)) + ", ";
  if (value.is_cache) others += describe(Dtype::int8, shape_in(value, Dtype::int8)) + ", float16 or ";
  return others + describe(value.dtype, value.shape) + known;
}

void require_count(std::size_t found, std::size_t expected, const char* what) {
  if (found == expected) return;
  throw std::invalid_argument("expected " + std::to_string(expected) + " " + what + ", got " +
                              std::to_string(found));
}

// Adds the segment to the messages of exceptions of `act` if the chunk has several segments.
template <typename Act>
void name_segment(std::size_t index, std::size_t num_segments, const Act& act) {
  const auto named = [&](const std::exception& error) {
    return (num_segments > 1 ? "segment " + std::to_string(index) + ": " : "") + error.what();
  };
  try {
    act();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(named(error));
  } catch (const std::out_of_range& error) {
    throw std::out_of_range(named(error));
  }
}

}  // namespace

// Views in the order of definition_.segment_inputs.
struct Program::SegmentInputs {
  std::optional<std::size_t> num_rows;  // without a number, all positions of the chunk
  std::vector<const TensorView*> views;
};

// Operands of one segment.
struct Program::Segment {
  std::size_t first_row;
  Sizes sizes;
  std::vector<void*> data;  // by segment_place
  std::vector<Dtype> dtypes;
};

// State of one run. Values that belong to a segment have data here only if there is one segment.
struct Program::Chunk {
  std::byte* scratch;     // for all members
  std::byte* row_locals;  // for all members
  std::vector<void*> data;
  std::vector<Dtype> dtypes;
  Sizes sizes{};
  std::vector<Segment> segments = {};
  std::vector<std::size_t> first_items = {};  // by segment in a segmented loop, and the end of the last

  bool has_one_segment() const { return segments.size() == 1; }
};

// A thread's view of the run. It is the view of the chunk, except for the thread's rows in work; with several
// segments, it is that of the current segment.
struct Program::Member {
  std::byte* row_locals;
  float* scratch;
  Stopwatch* watch;
  std::vector<void*> data;
  std::vector<void*> segment_data;
  std::vector<Dtype> segment_dtypes;
};

void Program::run(std::span<const TensorView> inputs, std::span<const TensorView> outputs) {
  require_count(inputs.size(), definition_.inputs.size(), "inputs");
  std::vector<const TensorView*> of_chunk;
  SegmentInputs of_segment = {.num_rows = {}, .views = {}};
  of_chunk.reserve(definition_.chunk_inputs.size());
  of_segment.views.reserve(definition_.segment_inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool is_own = definition_.values[definition_.inputs[i]].segment_place.has_value();
    (is_own ? of_segment.views : of_chunk).push_back(&inputs[i]);
  }
  execute(of_chunk, outputs, {&of_segment, 1});
}

void Program::run_segments(std::span<const TensorView> inputs, std::span<const TensorView> outputs,
                           std::span<const SegmentViews> segments) {
  std::vector<const TensorView*> of_chunk;
  for (const TensorView& view : inputs) of_chunk.push_back(&view);
  std::vector<SegmentInputs> of_segments;
  for (const SegmentViews& segment : segments) {
    SegmentInputs& own = of_segments.emplace_back(SegmentInputs{.num_rows = segment.num_rows, .views = {}});
    for (const TensorView& view : segment.inputs) own.views.push_back(&view);
  }
  execute(of_chunk, outputs, of_segments);
}

void Program::execute(std::span<const TensorView* const> inputs, std::span<const TensorView> outputs,
                      std::span<const SegmentInputs> segments) {
  std::vector<Stopwatch> watches;  // one for each member
  if (times_) watches.assign(pool_->budget(), Stopwatch(definition_.parts.size()));
  ThreadPool::Team team(*pool_);  // memory is borrowed only here, so that a waiting caller holds none
  const MemoryPool::Block memory = pool_->memory().borrow(run_bytes_);
  Chunk chunk = make_chunk(memory.get());
  bind_chunk(inputs, outputs, chunk);
  bind_segments(segments, chunk);
  std::vector<Member> members = make_members(chunk, watches);
  check(chunk, members[0]);

  const std::size_t num_pieces = pool_->budget() * kPiecesPerThread;
  for (std::size_t index = 0; index < definition_.loops.size(); ++index) {
    const Loop& loop = definition_.loops[index];
    const auto body = [&](std::size_t begin, std::size_t end, std::size_t member) {
      compute(index, begin, end, chunk, members[member]);
    };
    const std::size_t num_items = number_items(loop, chunk, members[0]);
    const std::size_t fair_share = std::max<std::size_t>(ceil_divide(num_items, num_pieces), 1);
    team.parallel_for(num_items, round_up(fair_share, loop.piece_multiple), std::cref(body),
                      upcoming_[index]);
  }
  if (!times_) return;
  watches[0].lap(kBetweenSteps);
  times_->add(definition_.parts, watches);
}

std::vector<std::vector<std::string>> Program::step_names() const {
  std::vector<std::vector<std::string>> names;
  for (const Loop& loop : definition_.loops) {
    names.emplace_back();
    for (const Step& step : loop.steps) names.back().push_back(definition_.parts[step.part]);
  }
  return names;
}

Program::Chunk Program::make_chunk(std::byte* memory) const {
  const std::size_t members = pool_->budget();
  Chunk chunk = {.scratch = memory + arena_bytes_,
                 .row_locals = memory + arena_bytes_ + scratch_bytes_ * members,
                 .data = {},
                 .dtypes = {}};
  chunk.data.reserve(definition_.values.size());
  chunk.dtypes.reserve(definition_.values.size());
  for (const Value& value : definition_.values) {
    void* data = const_cast<void*>(value.data);  // steps only read constants
    if (value.kind == ValueKind::temporary) data = memory + value.arena_offset;
    chunk.data.push_back(data);
    chunk.dtypes.push_back(value.dtype);
  }
  return chunk;
}

Dtype Program::bind(const TensorView& view, ValueId id, const char* what, Sizes& sizes) const {
  const Value& value = definition_.values[id];
  const auto name = [&] { return std::string(what) + " '" + value.name + "'"; };
  const Dtype dtype = match_dtype(value, view) ? dtype_named(view.dtype) : value.dtype;
  if (view.dtype != name_of(dtype) || !match_shape(shape_in(value, dtype), view, sizes)) {
    throw std::invalid_argument(name() + ": expected " + expectation(value, sizes) + ", got " +
                                describe(view));
  }
  if (!view.is_contiguous) {
    throw std::invalid_argument(name() +
                                " is not contiguous row-major memory; pass numpy.ascontiguousarray of it");
  }
  if (value.kind != ValueKind::input && !view.is_writeable) {
    throw std::invalid_argument(name() + " is written to, but read-only");
  }
  return dtype;
}

void Program::bind_chunk(std::span<const TensorView* const> inputs, std::span<const TensorView> outputs,
                         Chunk& chunk) const {
  require_count(inputs.size(), definition_.chunk_inputs.size(), "inputs with rows");
  require_count(outputs.size(), definition_.outputs.size(), "outputs");
  const auto bind_one = [&](const TensorView& view, ValueId id, const char* what) {
    chunk.dtypes[id] = bind(view, id, what, chunk.sizes);
    chunk.data[id] = view.data;
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) bind_one(*inputs[i], definition_.chunk_inputs[i], "input");
  for (std::size_t i = 0; i < outputs.size(); ++i) bind_one(outputs[i], definition_.outputs[i], "output");
  for (const Symbol symbol : {Symbol::T, Symbol::R}) {
    const std::size_t rows = chunk.sizes[static_cast<std::size_t>(symbol)].value_or(0);
    if (rows > definition_.max_rows) {
      throw std::invalid_argument(std::string(name_of(symbol)) + " = " + std::to_string(rows) +
                                  " rows, but the program was compiled for at most " +
                                  std::to_string(definition_.max_rows));
    }
  }
}

void Program::bind_segments(std::span<const SegmentInputs> segments, Chunk& chunk) const {
  if (segments.empty()) throw std::invalid_argument("expected at least 1 segment, got 0");
  const std::optional<std::size_t> rows_of_chunk = chunk.sizes[static_cast<std::size_t>(Symbol::T)];
  std::size_t first_row = 0;
  chunk.segments.reserve(segments.size());
  for (std::size_t index = 0; index < segments.size(); ++index) {
    name_segment(index, segments.size(), [&] {
      const SegmentInputs& given = segments[index];
      Segment& segment = chunk.segments.emplace_back(
          Segment{.first_row = first_row, .sizes = chunk.sizes, .data = {}, .dtypes = {}});
      if (given.num_rows) {
        if (*given.num_rows == 0) throw std::invalid_argument("expected at least 1 row, got 0");
        segment.sizes[static_cast<std::size_t>(Symbol::T)] = given.num_rows;
        first_row = checked_add(first_row, *given.num_rows);
      } else {
        first_row = rows_of_chunk.value_or(0);
      }
      require_count(given.views.size(), definition_.segment_inputs.size(), "states and inputs without rows");
      segment.data.reserve(given.views.size());
      segment.dtypes.reserve(given.views.size());
      for (std::size_t i = 0; i < given.views.size(); ++i) {
        segment.dtypes.push_back(
            bind(*given.views[i], definition_.segment_inputs[i], "input", segment.sizes));
        segment.data.push_back(given.views[i]->data);
      }
    });
  }
  if (first_row != rows_of_chunk.value_or(0)) {
    throw std::invalid_argument("the segments have " + std::to_string(first_row) +
                                " rows together, the chunk has " + std::to_string(rows_of_chunk.value_or(0)));
  }
  if (!chunk.has_one_segment()) return check_states_apart(segments);
  const Segment& all = chunk.segments.front();
  chunk.sizes = all.sizes;
  for (std::size_t i = 0; i < all.data.size(); ++i) {
    chunk.data[definition_.segment_inputs[i]] = all.data[i];
    chunk.dtypes[definition_.segment_inputs[i]] = all.dtypes[i];
  }
}

void Program::check_states_apart(std::span<const SegmentInputs> segments) const {
  struct Range {
    std::uintptr_t begin, end;
    std::size_t segment, place;
  };
  std::vector<Range> ranges;
  for (std::size_t index = 0; index < segments.size(); ++index) {
    for (std::size_t i = 0; i < segments[index].views.size(); ++i) {
      if (definition_.values[definition_.segment_inputs[i]].kind != ValueKind::state) continue;
      const TensorView& view = *segments[index].views[i];
      std::size_t bytes = bytes_of(dtype_named(view.dtype));
      for (const std::size_t size : view.shape) bytes *= size;
      const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
      if (bytes > 0) ranges.push_back({.begin = begin, .end = begin + bytes, .segment = index, .place = i});
    }
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  const auto name = [&](const Range& range) {
    return "'" + definition_.values[definition_.segment_inputs[range.place]].name + "'";
  };
  for (std::size_t i = 1, furthest = 0; i < ranges.size(); ++i) {
    const Range &before = ranges[furthest], &range = ranges[i];
    if (range.begin < before.end && range.segment != before.segment) {
      const bool is_in_order = before.segment < range.segment;  // their order in memory is arbitrary
      const Range &low = is_in_order ? before : range, &high = is_in_order ? range : before;
      throw std::invalid_argument("segments " + std::to_string(low.segment) + " and " +
                                  std::to_string(high.segment) + " share the memory of " + name(low) +
                                  " and " + name(high) + "; every segment needs states of its own");
    }
    if (range.end > before.end) furthest = i;
  }
}

std::vector<Program::Member> Program::make_members(const Chunk& chunk, std::span<Stopwatch> watches) const {
  std::vector<Member> members;
  members.reserve(pool_->budget());
  for (std::size_t i = 0; i < pool_->budget(); ++i) {
    members.push_back({.row_locals = chunk.row_locals + i * row_local_bytes_,
                       .scratch = reinterpret_cast<float*>(chunk.scratch + i * scratch_bytes_),
                       .watch = watches.empty() ? nullptr : &watches[i],
                       .data = chunk.data,
                       .segment_data = {},
                       .segment_dtypes = {}});
    if (chunk.has_one_segment()) continue;
    members.back().segment_data = chunk.data;
    members.back().segment_dtypes = chunk.dtypes;
  }
  return members;
}

// Returns the frame of a segment. It is valid for the values in `uses`, until the member enters another
// segment.
Frame Program::enter(const Chunk& chunk, std::size_t index, const std::vector<ValueId>& uses,
                     Member& member) const {
  const Segment& segment = chunk.segments[index];
  if (chunk.has_one_segment()) {
    return {.data = member.data, .dtypes = chunk.dtypes, .sizes = segment.sizes, .watch = member.watch};
  }
  for (const ValueId id : uses) {
    const Value& value = definition_.values[id];
    if (value.segment_place) {
      member.segment_data[id] = segment.data[*value.segment_place];
      member.segment_dtypes[id] = segment.dtypes[*value.segment_place];
    } else {
      const auto first =
          reinterpret_cast<std::uintptr_t>(member.data[id]) + segment.first_row * value.bytes_of_row;
      member.segment_data[id] = reinterpret_cast<void*>(first);
    }
  }
  return {.data = member.segment_data,
          .dtypes = member.segment_dtypes,
          .sizes = segment.sizes,
          .watch = member.watch};
}

void Program::check(const Chunk& chunk, Member& member) const {
  for (const Check& check : definition_.checks) {
    if (!check.is_segmented) {
      check.look({.data = member.data, .dtypes = chunk.dtypes, .sizes = chunk.sizes});
      continue;
    }
    for (std::size_t index = 0; index < chunk.segments.size(); ++index) {
      name_segment(index, chunk.segments.size(),
                   [&] { check.look(enter(chunk, index, check.uses, member)); });
    }
  }
}

// Number of items of the loop; the items of successive segments are adjacent.
std::size_t Program::number_items(const Loop& loop, Chunk& chunk, Member& member) const {
  const bool is_segmented = std::ranges::any_of(loop.steps, &Step::is_segmented);
  if (!is_segmented || chunk.has_one_segment())
    return loop.num_items({.data = member.data, .dtypes = chunk.dtypes, .sizes = chunk.sizes});
  chunk.first_items.assign(1, 0);
  for (std::size_t index = 0; index < chunk.segments.size(); ++index) {
    const Frame frame = enter(chunk, index, loop.steps.front().uses, member);
    chunk.first_items.push_back(chunk.first_items.back() + loop.num_items(frame));
  }
  return chunk.first_items.back();
}

void Program::compute(std::size_t loop_index, std::size_t begin, std::size_t end, const Chunk& chunk,
                      Member& member) const {
  const Loop& loop = definition_.loops[loop_index];
  const std::vector<std::size_t>& first_items = chunk.first_items;
  const Frame whole = {
      .data = member.data, .dtypes = chunk.dtypes, .sizes = chunk.sizes, .watch = member.watch};
  const std::size_t at_once = loop.steps.size() > 1 ? kRowsAtOnce : end - begin;
  whole.lap(kBetweenSteps);
  for (; begin < end; begin += at_once) {
    // The address that row 0 would have if the thread's memory included it.
    for (const RowLocal& local : row_locals_[loop_index]) {
      const auto place =
          reinterpret_cast<std::uintptr_t>(member.row_locals + local.offset) - begin * local.row_bytes;
      member.data[local.value] = reinterpret_cast<void*>(place);
    }
    const std::size_t last = std::min(begin + at_once, end);
    for (const Step& step : loop.steps) {
      if (!step.is_segmented || chunk.has_one_segment()) {
        step.compute(whole, begin, last, member.scratch);
        whole.lap(step.part);
        continue;
      }
      const auto after = std::ranges::upper_bound(first_items, begin);
      for (auto index = static_cast<std::size_t>(after - first_items.begin()) - 1; first_items[index] < last;
           ++index) {
        const std::size_t first = first_items[index];
        step.compute(enter(chunk, index, step.uses, member), std::max(begin, first) - first,
                     std::min(last, first_items[index + 1]) - first, member.scratch);
      }
      whole.lap(step.part);
    }
  }
}

}  // namespace chunkrt
