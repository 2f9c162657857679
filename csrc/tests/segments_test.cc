// Tests chunks of several segments. Results and states are bit-identical to those of separate runs, for all
// positions, caches and threads. Invalid calls are refused before any writes.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "program/operators/operators.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kWidth = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 8, kAttended = kHeads * kHeadDim;
constexpr std::size_t kExperts = 5, kPicked = 2, kInner = 12, kTaps = 3, kChannels = 21;
constexpr std::size_t kKeyHeads = 2, kKeyDim = 8, kValueHeads = 2, kValueDim = 16;
constexpr std::size_t kContext = 400, kWindow = 20, kMostRows = 40, kMostSegments = 12;
constexpr Dimension kRows = {Symbol::T};

using Bytes = std::vector<std::byte>;

ValueId floats(ProgramBuilder& builder, std::vector<std::size_t> shape, std::uint32_t seed) {
  const std::size_t count =
      std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<std::size_t>());
  const auto data = std::make_shared<std::vector<float>>(Random(seed).floats(count, 0.7f));
  return builder.constant(data->data(), Dtype::float32, shape, data);
}

ValueId packed(ProgramBuilder& builder, std::vector<std::size_t> shape, std::uint32_t seed) {
  const std::size_t count =
      std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<std::size_t>());
  const auto data = std::make_shared<std::vector<std::int8_t>>(Random(seed).int8s(count));
  for (std::int8_t& value : *data) value = std::max<std::int8_t>(value, -127);
  return builder.constant(data->data(), Dtype::int8, shape, data);
}

// Computes input + position + the row within the segment, twice, as a step between other steps of its loop;
// the result has memory only for the rows in work.
ValueId marked(ProgramBuilder& builder, ValueId input, ValueId position) {
  const ValueId out = builder.float_rows(Symbol::T, kWidth);
  builder.add_row_step(Symbol::T, "marked", {input, position, out},
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                         const auto first = static_cast<float>(*frame.get<const std::int64_t>(position));
                         for (std::size_t i = begin * kWidth; i < end * kWidth; ++i) {
                           frame.get<float>(out)[i] =
                               frame.get<const float>(input)[i] + first + static_cast<float>(i / kWidth);
                         }
                       });
  return add(builder, out, out);
}

// A program with every operator that has a state, after experts with reordered rows, and with norms that
// share a loop with the new rows of caches. Operands of a segment are declared between those of the chunk.
std::unique_ptr<Program> build(std::size_t budget) {
  ProgramBuilder builder(std::make_shared<ThreadPool>(budget), kMostSegments * kMostRows);
  const auto cache = [&](const char* name, Symbol slots) {
    return builder.state(name, {fixed(kKvHeads), rows_dimension(slots), fixed(kHeadDim)});
  };
  const ValueId x = builder.input("x", Dtype::float32, {kRows, fixed(kWidth)});
  const ValueId position = builder.input("position", Dtype::int64, {fixed(1)});
  const ValueId ring_keys = cache("ring_keys", Symbol::W);
  const ValueId router = builder.input("router", Dtype::float32, {kRows, fixed(kExperts)});
  const ValueId rope_position = builder.input("rope_position", Dtype::int64, {fixed(1)});
  const ValueId ring_values = cache("ring_values", Symbol::W);
  const ValueId keys = cache("keys", Symbol::P), values = cache("values", Symbol::P);
  const ValueId columns_state = builder.state("columns", {fixed(kChannels), fixed(kTaps - 1)});
  const ValueId delta_columns = builder.state("delta_columns", {fixed(kWidth), fixed(kTaps - 1)});
  const ValueId recurrent =
      builder.state("recurrent", {fixed(kValueHeads), fixed(kKeyDim), fixed(kValueDim)});

  const ValueId experts = routed_experts(
      builder, x, router, packed(builder, {kExperts, 2, 16, 16, 4}, 1),
      floats(builder, {kExperts, 2 * kInner}, 2), packed(builder, {kExperts, 4, 3, 16, 4}, 3),
      floats(builder, {kExperts, kWidth}, 4), std::nullopt, {.top_k = kPicked, .norm_topk_prob = true});
  const ValueId normed = rms_norm(builder, experts, floats(builder, {kWidth}, 5), 1e-5f);
  const ValueId marks = marked(builder, normed, position);
  const ValueId qkv = head_norm(builder, normed, floats(builder, {6, kHeadDim}, 6), 1e-5f);
  const ValueId cos = floats(builder, {kContext, kHeadDim / 2}, 7),
                sin = floats(builder, {kContext, kHeadDim / 2}, 8);
  const ValueId near = attention(builder, qkv, position, position, cos, sin, ring_keys, ring_values,
                                 {.num_heads = kHeads,
                                  .num_kv_heads = kKvHeads,
                                  .head_dim = kHeadDim,
                                  .scale = 0.3f,
                                  .window = kWindow});
  const ValueId between =
      linear(builder, near, packed(builder, {4, 8, 16, 4}, 9), floats(builder, {kWidth}, 10), {}, qkv, 1);
  const ValueId far = attention(builder, rms_norm(builder, between, floats(builder, {kWidth}, 11), 1e-5f),
                                position, rope_position, cos, sin, keys, values,
                                {.num_heads = kHeads,
                                 .num_kv_heads = kKvHeads,
                                 .head_dim = kHeadDim,
                                 .scale = 0.3f,
                                 .has_raw_keys = true});
  const ValueId convolved = short_conv(builder, columns(builder, between, 1, 3 * kChannels),
                                       floats(builder, {kChannels, 1, kTaps}, 12), {}, columns_state);
  const ValueId ones = builder.floats(std::vector<float>(kValueHeads, -1.0f));
  const ValueId ruled = gated_delta_rule(
      builder, between, mul(builder, softplus(builder, columns(builder, x, 0, kValueHeads)), ones),
      sigmoid(builder, columns(builder, x, 9, kValueHeads)), floats(builder, {kWidth, 1, kTaps}, 13), {},
      delta_columns, recurrent, {kKeyHeads, kValueHeads, kKeyDim, kValueDim, true});
  builder.output("marks", marks);
  builder.output("far", far);
  builder.output("convolved", convolved);
  builder.output("ruled", ruled);
  return builder.build();
}

constexpr std::size_t kOutputWidths[] = {kWidth, kAttended, kChannels, kValueHeads* kValueDim};

struct State {
  std::string dtype;
  std::vector<std::size_t> shape;
  Bytes bytes;

  State(std::string dtype_, std::vector<std::size_t> shape_)
      : dtype(std::move(dtype_)), shape(std::move(shape_)) {
    std::size_t count = bytes_of(dtype_named(dtype));
    for (const std::size_t size : shape) count *= size;
    bytes.assign(count, shape.size() == 3 && shape[1] > kKeyDim ? std::byte{0xff} : std::byte{});
  }
  TensorView view() { return {bytes.data(), dtype, shape, true, true}; }
};

// The state of one sequence, and the inputs of its next rows.
struct Sequence {
  std::int64_t position = 0, rope_position = 0;
  std::vector<State> states;  // in the order of their declaration
  std::vector<float> x, router;

  std::vector<TensorView> own() {
    std::vector<TensorView> views = {{&position, "int64", {1}, true, false},
                                     states[0].view(),
                                     {&rope_position, "int64", {1}, true, false}};
    for (std::size_t i = 1; i < states.size(); ++i) views.push_back(states[i].view());
    return views;
  }
  std::size_t num_rows() const { return x.size() / kWidth; }

  void draw(std::size_t rows, std::uint32_t seed) {
    x = Random(seed).floats(rows * kWidth, 2.0f);
    router = Random(seed + 1).floats(rows * kExperts, 2.0f);
  }
};

std::vector<std::vector<float>> make_outputs(std::size_t rows) {
  std::vector<std::vector<float>> outputs;
  for (const std::size_t width : kOutputWidths) outputs.emplace_back(rows * width, 99.0f);
  return outputs;
}

std::vector<TensorView> views_of(std::vector<std::vector<float>>& outputs, std::size_t rows) {
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    views.push_back({outputs[i].data(), "float32", {rows, kOutputWidths[i]}, true, true});
  return views;
}

std::vector<std::vector<float>> run_alone(Program& program, Sequence& sequence) {
  const std::size_t rows = sequence.num_rows();
  const std::vector<TensorView> own = sequence.own();
  std::vector<TensorView> inputs = {{sequence.x.data(), "float32", {rows, kWidth}, true, false}};
  inputs.insert(inputs.end(), own.begin(), own.begin() + 2);
  inputs.push_back({sequence.router.data(), "float32", {rows, kExperts}, true, false});
  inputs.insert(inputs.end(), own.begin() + 2, own.end());
  std::vector<std::vector<float>> outputs = make_outputs(rows);
  program.run(inputs, views_of(outputs, rows));
  return outputs;
}

// The rows of all sequences in one chunk.
struct Packed {
  explicit Packed(std::vector<Sequence>& sequences) {
    for (Sequence& sequence : sequences) {
      x.insert(x.end(), sequence.x.begin(), sequence.x.end());
      router.insert(router.end(), sequence.router.begin(), sequence.router.end());
      segments.push_back({.num_rows = sequence.num_rows(), .inputs = sequence.own()});
      rows += sequence.num_rows();
    }
    outputs = make_outputs(rows);
  }

  void run(Program& program) {
    const TensorView inputs[] = {{x.data(), "float32", {rows, kWidth}, true, false},
                                 {router.data(), "float32", {rows, kExperts}, true, false}};
    program.run_segments(inputs, views_of(outputs, rows), segments);
  }

  std::size_t rows = 0;
  std::vector<float> x, router;
  std::vector<SegmentViews> segments;
  std::vector<std::vector<float>> outputs;
};

std::size_t draw(Random& random, std::size_t least, std::size_t most) {
  const float share = random.floats(1, 0.5f)[0] + 0.5f;
  return std::min(most, least + static_cast<std::size_t>(share * static_cast<float>(most - least + 1)));
}

// A sequence that has already run some tokens, with caches of an individual type and size.
Sequence make_sequence(Program& program, Random& random, std::size_t rows) {
  constexpr const char* kTypes[] = {"float32", "float16", "int8"};
  const std::size_t before = draw(random, 0, 4) * draw(random, 0, kMostRows);
  const std::string ring_type = kTypes[draw(random, 0, 2)], type = kTypes[draw(random, 0, 2)];
  const auto width = [](const std::string& dtype) {
    return kHeadDim + (dtype == "int8" ? int8_groups(kHeadDim) * sizeof(float) : 0);
  };
  const std::vector<std::size_t> ring = {kKvHeads, 64 * draw(random, 1, 3), width(ring_type)},
                                 cache = {kKvHeads, before + rows + draw(random, 9, 70), width(type)};
  Sequence sequence;
  sequence.states = {{ring_type, ring},
                     {ring_type, ring},
                     {type, cache},
                     {type, cache},
                     {"float32", {kChannels, kTaps - 1}},
                     {"float32", {kWidth, kTaps - 1}},
                     {"float32", {kValueHeads, kKeyDim, kValueDim}}};
  sequence.rope_position = static_cast<std::int64_t>(draw(random, 0, 9));
  const auto seed = static_cast<std::uint32_t>(draw(random, 0, 1 << 20));
  for (std::size_t done = 0; done < before;) {
    const std::size_t count = std::min(kMostRows, before - done);
    sequence.draw(count, seed + static_cast<std::uint32_t>(done));
    run_alone(program, sequence);
    done += count;
    sequence.position += static_cast<std::int64_t>(count);
    sequence.rope_position += static_cast<std::int64_t>(count);
  }
  sequence.draw(rows, seed + 1000);
  return sequence;
}

void check_same_states(const Sequence& found, const Sequence& expected, const std::string& what) {
  for (std::size_t i = 0; i < found.states.size(); ++i) {
    check(found.states[i].bytes == expected.states[i].bytes,
          [&] { return what + ": state " + std::to_string(i) + " differs"; });
  }
}

// Runs the sequences alone, then together.
void check_packed(Program& program, std::vector<Sequence> sequences, const std::string& what) {
  std::vector<Sequence> alone = sequences;
  Packed chunk(sequences);
  chunk.run(program);
  std::size_t first_row = 0;
  for (std::size_t s = 0; s < alone.size(); ++s) {
    const std::string where = what + ", segment " + std::to_string(s) + " of " + std::to_string(alone.size());
    const std::vector<std::vector<float>> expected = run_alone(program, alone[s]);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      check_same(chunk.outputs[i].data() + first_row * kOutputWidths[i], expected[i].data(),
                 expected[i].size(), where + ", output " + std::to_string(i));
    }
    check_same_states(sequences[s], alone[s], where);
    first_row += alone[s].num_rows();
  }
}

void test_any_segments() {
  for (const std::size_t budget : {1u, 2u, 4u}) {
    const std::unique_ptr<Program> program = build(budget);
    Random random(static_cast<std::uint32_t>(budget));
    for (std::size_t count = 1; count <= kMostSegments; ++count) {
      for (const bool is_decode : {false, true}) {
        std::vector<Sequence> sequences;
        for (std::size_t s = 0; s < count; ++s) {
          // One of the decoding sequences is in the middle of its prompt.
          const std::size_t rows = is_decode && s != count / 2 ? 1 : draw(random, 1, kMostRows);
          sequences.push_back(make_sequence(*program, random, rows));
        }
        check_packed(*program, std::move(sequences),
                     std::to_string(budget) + " threads" + (is_decode ? ", single rows" : ""));
      }
    }
  }
}

template <typename Error>
void check_refused(const std::function<void()>& act, const std::string& expected) {
  try {
    act();
  } catch (const Error& error) {
    return check(std::string(error.what()).find(expected) != std::string::npos,
                 [&] { return "expected \"" + expected + "\", got: " + error.what(); });
  }
  throw Failure("not refused: " + expected);
}

// A call with three sequences, and a change that makes the call invalid. The invalid call must not write any
// memory.
template <typename Error>
void check_wrong(Program& program, const std::function<void(Packed&, std::vector<Sequence>&)>& change,
                 const std::string& expected) {
  Random random(3);
  std::vector<Sequence> sequences;
  for (const std::size_t rows : {5u, 1u, 9u}) sequences.push_back(make_sequence(program, random, rows));
  Packed chunk(sequences);
  change(chunk, sequences);
  const std::vector<Sequence> before = sequences;
  check_refused<Error>([&] { chunk.run(program); }, expected);
  for (const std::vector<float>& output : chunk.outputs) {
    check(std::ranges::all_of(output, [](float y) { return y == 99.0f; }),
          [&] { return expected + ": an output was written"; });
  }
  for (std::size_t s = 0; s < sequences.size(); ++s) check_same_states(sequences[s], before[s], expected);
}

void test_refusals() {
  const std::unique_ptr<Program> program = build(2);
  using Argument = std::invalid_argument;
  using Sequences = std::vector<Sequence>;
  check_wrong<std::out_of_range>(
      *program, [](Packed&, Sequences& sequences) { sequences[2].position = -1; },
      "segment 2: input 'position': 9 rows from -1 on do not fit");
  check_wrong<std::out_of_range>(
      *program, [](Packed&, Sequences& sequences) { sequences[1].rope_position = kContext; },
      "segment 1: input 'rope_position': 1 rows from 400 on do not fit");
  check_wrong<std::out_of_range>(
      *program,
      [](Packed&, Sequences& sequences) { sequences[2].position = sequences[2].rope_position = 300; },
      "segment 2: input 'position': 9 rows from 300 on do not fit: the cache holds");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments[2].num_rows = 8; },
      "the segments have 14 rows together, the chunk has 15");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments[0].num_rows = 6; },
      "the segments have 16 rows together, the chunk has 15");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments.pop_back(); },
      "the segments have 6 rows together, the chunk has 15");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments.resize(1); },
      "the segments have 5 rows together, the chunk has 15");
  check_wrong<std::length_error>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments[0].num_rows = ~std::size_t{0}; }, "sizes");
  check_wrong<Argument>(
      *program,
      [](Packed& chunk, Sequences&) {
        chunk.segments[1].num_rows = 0;
        chunk.segments[2].num_rows = 10;
      },
      "segment 1: expected at least 1 row, got 0");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments.clear(); },
      "expected at least 1 segment, got 0");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments[1].inputs.pop_back(); },
      "segment 1: expected 9 states and inputs without rows, got 8");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments[2].inputs.back().is_writeable = false; },
      "segment 2: input 'recurrent' is written to, but read-only");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments[1].inputs[4].shape[1] += 1; },
      "segment 1: input 'values': expected");
  check_wrong<Argument>(
      *program,
      [elsewhere = std::vector<float>(kKvHeads * kContext * kHeadDim)](Packed& chunk, Sequences&) mutable {
        TensorView& given = chunk.segments[0].inputs[4];
        given.dtype = given.dtype == "int8" ? "float32" : "int8";
        given.shape[2] = given.dtype == "int8" ? 12 : 8;
        given.data = elsewhere.data();  // the float32 cache is larger, but must not overlap adjacent memory
      },
      "segment 0: attention: the key and value caches must be of one type");
  check_wrong<Argument>(
      *program, [](Packed& chunk, Sequences&) { chunk.segments[2].inputs = chunk.segments[0].inputs; },
      "segments 0 and 2 share the memory of");
  check_wrong<Argument>(
      *program,
      [](Packed& chunk, Sequences&) {  // the last bytes of one are the first of another
        TensorView& given = chunk.segments[2].inputs[8];
        given.data = static_cast<std::byte*>(chunk.segments[1].inputs[8].data) +
                     (kValueHeads * kKeyDim * kValueDim - 1) * sizeof(float);
      },
      "segments 1 and 2 share the memory of 'recurrent' and 'recurrent'");
  check_wrong<Argument>(
      *program,
      [](Packed& chunk, Sequences&) {  // a small one of the same segment begins between the two
        auto* large = static_cast<std::byte*>(chunk.segments[0].inputs[8].data);
        chunk.segments[0].inputs[6].data = large + 64;
        chunk.segments[1].inputs[6].data = large + 512;
      },
      "segments 0 and 1 share the memory of 'recurrent' and 'columns'");
}

// Segments may share inputs that are not states, and the rows of a run are those of the chunk.
void test_shared_inputs() {
  const std::unique_ptr<Program> program = build(2);
  Random random(4);
  std::vector<Sequence> sequences = {make_sequence(*program, random, 3)};
  sequences.push_back(sequences[0]);
  std::vector<Sequence> alone = {sequences[0]};
  Packed chunk(sequences);
  chunk.segments[1].inputs[0] = chunk.segments[0].inputs[0];
  chunk.segments[1].inputs[2] = chunk.segments[0].inputs[2];
  chunk.run(*program);
  const std::vector<std::vector<float>> expected = run_alone(*program, alone[0]);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    for (const std::size_t first_row : {0u, 3u}) {
      check_same(chunk.outputs[i].data() + first_row * kOutputWidths[i], expected[i].data(),
                 expected[i].size(), "output " + std::to_string(i));
    }
  }
}

// A step that processes one segment at a time needs separate rows for each segment in all values that it
// uses.
void test_builder() {
  ProgramBuilder builder(std::make_shared<ThreadPool>(1), 4);
  const ValueId position = builder.input("position", Dtype::int64, {fixed(1)});
  const auto nothing = [](const Frame&, std::size_t, std::size_t, float*) {};
  const auto one = [](const Frame&) { return std::size_t{1}; };
  for (const Shape& shape :
       {Shape{fixed(8)}, Shape{fixed(8), kRows}, Shape{{Symbol::R}, fixed(8)}, Shape{kRows, kRows}}) {
    const ValueId value = builder.temporary(Dtype::float32, shape);
    check_refused<std::invalid_argument>(
        [&] { builder.add_loop(one, 1, "nothing", {position, value}, nothing); },
        "a step that runs by segment cannot use rows of " + describe(Dtype::float32, shape));
  }
  check_refused<std::invalid_argument>(
      [&] { builder.add_row_step(Symbol::R, "nothing", {position}, nothing); },
      "segments have rows T of their own, not R");
  check_refused<std::invalid_argument>([&] { builder.add_row_step(Symbol::T, "", {position}, nothing); },
                                       "a step has a name");
}

}  // namespace

void test_segments(Suite& suite) {
  suite.run("segments: any, with any thread budget", test_any_segments);
  suite.run("segments: refused calls", test_refusals);
  suite.run("segments: shared inputs", test_shared_inputs);
  suite.run("segments: operands of steps", test_builder);
}

}  // namespace chunkrt::testing
