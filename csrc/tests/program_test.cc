// A program of every operator: the same bits with any thread budget, in any chunks, by any number of callers.
#include <algorithm>
#include <thread>
#include <vector>

#include "program/builder.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kVocabulary = 50, kHidden = 48, kInner = 40, kHeads = 3, kKvHeads = 1, kHeadDim = 16;
constexpr std::size_t kLength = 95, kMaxRows = 40;
constexpr std::size_t kQkvWidth = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr Dimension kRows = {Symbol::T}, kLogitRows = {Symbol::R}, kPositions = {Symbol::P};

Dimension fixed(std::size_t size) { return {std::nullopt, size}; }

// Random constants, owned by the program that uses them.
class Constants {
 public:
  explicit Constants(ProgramBuilder& builder) : builder_(builder) {}

  ValueId floats(std::vector<std::size_t> shape, float limit) {
    const std::size_t count = shape.size() == 1 ? shape[0] : shape[0] * shape[1];
    const auto data = std::make_shared<std::vector<float>>(random_.floats(count, limit));
    return builder_.constant(data->data(), Dtype::float32, shape, data);
  }

  ValueId linear(ValueId input, std::size_t depth, std::size_t columns, std::optional<ValueId> residual,
                 std::size_t num_digits = 1) {
    const std::size_t blocks = (columns + 15) / 16, groups = (depth + 3) / 4;
    // Every depth here is whole; what the last columns are padded with reaches no result.
    const auto packed = std::make_shared<std::vector<std::int8_t>>(random_.int8s(blocks * groups * 64));
    const ValueId weight = builder_.constant(packed->data(), Dtype::int8, {blocks, groups, 16, 4}, packed);
    return builder_.linear(input, weight, floats({columns}, 2e-3f), floats({columns}, 0.1f), residual,
                           num_digits);
  }

 private:
  ProgramBuilder& builder_;
  Random random_{1};
};

// One decoder layer between an embedding and a head.
std::unique_ptr<Program> build_decoder(std::size_t budget) {
  ProgramBuilder builder(std::make_shared<ThreadPool>(budget), kMaxRows);
  Constants constants(builder);
  const ValueId ids = builder.input("input_ids", Dtype::int64, {kRows});
  const ValueId position = builder.input("position", Dtype::int64, {fixed(1)});
  const ValueId logit_rows = builder.input("logit_rows", Dtype::int64, {kLogitRows});
  const Shape cache_shape = {fixed(kKvHeads), kPositions, fixed(kHeadDim)};
  const ValueId key_cache = builder.state("key_cache", cache_shape);
  const ValueId value_cache = builder.state("value_cache", cache_shape);

  const ValueId hidden = builder.gather(constants.floats({kVocabulary, kHidden}, 1.0f), ids);
  const ValueId normed = builder.rms_norm(hidden, constants.floats({kHidden}, 1.0f), 1e-5f);
  const ValueId qkv = constants.linear(normed, kHidden, kQkvWidth, std::nullopt);
  const ValueId cos = constants.floats({kLength, kHeadDim / 2}, 1.0f);
  const ValueId sin = constants.floats({kLength, kHeadDim / 2}, 1.0f);
  const ValueId attended = builder.attention(
      qkv, position, cos, sin, key_cache, value_cache,
      {.num_heads = kHeads, .num_kv_heads = kKvHeads, .head_dim = kHeadDim, .scale = 0.25f});
  const ValueId residual = constants.linear(attended, kHeads * kHeadDim, kHidden, hidden);
  const ValueId mlp_in = builder.rms_norm(residual, constants.floats({kHidden}, 1.0f), 1e-5f);
  const ValueId gate_up = constants.linear(mlp_in, kHidden, 2 * kInner, std::nullopt);
  const ValueId gate = builder.columns(gate_up, 0, kInner), up = builder.columns(gate_up, kInner, kInner);
  const ValueId apart = builder.mul(builder.mul(gate, builder.sigmoid(gate)), up);
  const ValueId inner = builder.add(builder.silu_mul(gate_up), apart);
  const ValueId out = constants.linear(inner, kInner, kHidden, residual, 2);
  builder.output("logits",
                 constants.linear(builder.gather(out, logit_rows), kHidden, kVocabulary, std::nullopt));
  return builder.build();
}

// Logits of every row of one prompt, in chunks.
std::vector<float> run_prompt(Program& program, std::size_t chunk) {
  std::vector<float> keys(kKvHeads * kLength * kHeadDim), values(keys.size()), logits(kLength * kVocabulary);
  for (std::size_t start = 0; start < kLength; start += chunk) {
    const std::size_t rows = std::min(chunk, kLength - start);
    std::vector<std::int64_t> ids(rows), logit_rows(rows);
    for (std::size_t i = 0; i < rows; ++i) {
      ids[i] = static_cast<std::int64_t>((start + i) * 7 % kVocabulary);
      logit_rows[i] = static_cast<std::int64_t>(i);
    }
    std::int64_t position = static_cast<std::int64_t>(start);
    const std::vector<std::size_t> cache_shape = {kKvHeads, kLength, kHeadDim};
    const TensorView inputs[] = {{ids.data(), "int64", {rows}, true, false},
                                 {&position, "int64", {1}, true, false},
                                 {logit_rows.data(), "int64", {rows}, true, false},
                                 {keys.data(), "float32", cache_shape, true, true},
                                 {values.data(), "float32", cache_shape, true, true}};
    const TensorView outputs[] = {
        {logits.data() + start * kVocabulary, "float32", {rows, kVocabulary}, true, true}};
    program.run(inputs, outputs);
  }
  return logits;
}

void test_budgets_and_chunks() {
  const std::vector<float> expected = run_prompt(*build_decoder(1), kMaxRows);
  check(std::any_of(expected.begin(), expected.end(), [](float x) { return x != 0.0f; }), "all logits are 0");
  for (const std::size_t budget : {1u, 2u, 3u, 8u}) {
    const std::unique_ptr<Program> program = build_decoder(budget);
    for (const std::size_t chunk : {1u, 31u, 32u, 33u, 40u}) {
      check_same(run_prompt(*program, chunk).data(), expected.data(), expected.size(),
                 std::to_string(budget) + " threads, chunks of " + std::to_string(chunk));
    }
  }
}

void test_callers_together() {
  const std::vector<float> expected = run_prompt(*build_decoder(1), kMaxRows);
  for (const std::size_t budget : {1u, 2u, 3u}) {
    const std::unique_ptr<Program> program = build_decoder(budget);
    std::vector<std::vector<float>> found(4);
    std::vector<std::thread> callers;
    for (std::size_t i = 0; i < found.size(); ++i) {
      callers.emplace_back([&, i] { found[i] = run_prompt(*program, 8 + i); });
    }
    for (std::thread& caller : callers) caller.join();
    for (const std::vector<float>& logits : found) {
      check_same(logits.data(), expected.data(), expected.size(),
                 std::to_string(budget) + " threads, 4 callers");
    }
  }
}

}  // namespace

void test_program(Suite& suite) {
  suite.run("program: any thread budget, any chunks", test_budgets_and_chunks);
  suite.run("program: callers together", test_callers_together);
}

}  // namespace chunkrt::testing
