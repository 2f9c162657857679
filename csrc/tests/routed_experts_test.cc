// Tests routed experts in programs: the result of each row is bit-identical to that of its experts as
// separate linears, regardless of other rows and the number of threads.
#include <algorithm>
#include <vector>

#include "program/operators/operators.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kExperts = 7, kPicked = 3, kWidth = 70, kInner = 36, kLength = 45;
constexpr Dimension kRows = {Symbol::T};

// A weight of each expert, packed.
struct Weight {
  Weight(std::size_t depth, std::size_t columns, std::uint32_t seed)
      : groups((depth + 3) / 4), blocks((columns + 15) / 16), columns(columns) {
    Random random(seed);
    packed = random.int8s(kExperts * blocks * groups * 64);
    for (std::int8_t& value : packed) value = std::max<std::int8_t>(value, -127);
    scales = random.floats(kExperts * columns, 0.01f);
  }

  std::pair<ValueId, ValueId> all(ProgramBuilder& builder) const {
    return {builder.constant(packed.data(), Dtype::int8, {kExperts, blocks, groups, 16, 4}, nullptr),
            builder.constant(scales.data(), Dtype::float32, {kExperts, columns}, nullptr)};
  }

  ValueId linear(ProgramBuilder& builder, ValueId input, std::size_t expert) const {
    const std::int8_t* of_expert = packed.data() + expert * blocks * groups * 64;
    const ValueId integers = builder.constant(of_expert, Dtype::int8, {blocks, groups, 16, 4}, nullptr);
    const ValueId of_columns =
        builder.constant(scales.data() + expert * columns, Dtype::float32, {columns}, nullptr);
    return chunkrt::linear(builder, input, integers, of_columns, {}, {}, 1);
  }

  std::size_t groups, blocks, columns;
  std::vector<std::int8_t> packed;
  std::vector<float> scales;
};

struct Case {
  Case() : x(Random(1).floats(kLength * kWidth, 2.0f)), logits(kLength * kExperts, -1000.0f) {
    for (std::size_t m = 0; m < kLength; ++m) {
      x[m * kWidth + m % 7] *= 40.0f;
      // The first row has kPicked large logits; other rows may have more, so that ties are broken.
      for (std::size_t i = 0; i < kPicked + m % 4; ++i)
        logits[m * kExperts + (m * m + 2 * i) % kExperts] = 3.0f;
    }
  }

  Weight gate_up{kWidth, 2 * kInner, 2}, down{kInner, kWidth, 3};
  std::vector<float> x, logits;
};

std::vector<float> run(Case& given, std::size_t budget, std::size_t chunk, bool norm_topk_prob) {
  ProgramBuilder builder(std::make_shared<ThreadPool>(budget), chunk);
  const ValueId input = builder.input("x", Dtype::float32, {kRows, fixed(kWidth)});
  const ValueId logits = builder.input("logits", Dtype::float32, {kRows, fixed(kExperts)});
  const auto [gate_up, gate_up_scales] = given.gate_up.all(builder);
  const auto [down, down_scales] = given.down.all(builder);
  builder.output("y", routed_experts(builder, input, logits, gate_up, gate_up_scales, down, down_scales,
                                     std::nullopt, {.top_k = kPicked, .norm_topk_prob = norm_topk_prob}));
  const auto program = builder.build();
  std::vector<float> out(kLength * kWidth);
  for (std::size_t start = 0; start < kLength; start += chunk) {
    const std::size_t rows = std::min(chunk, kLength - start);
    const TensorView inputs[] = {
        {given.x.data() + start * kWidth, "float32", {rows, kWidth}, true, false},
        {given.logits.data() + start * kExperts, "float32", {rows, kExperts}, true, false}};
    const TensorView outputs[] = {{out.data() + start * kWidth, "float32", {rows, kWidth}, true, true}};
    program->run(inputs, outputs);
  }
  return out;
}

// A program that applies every expert to every row, as linears.
std::vector<std::vector<float>> run_experts(Case& given) {
  ProgramBuilder builder(std::make_shared<ThreadPool>(1), kLength);
  const ValueId input = builder.input("x", Dtype::float32, {kRows, fixed(kWidth)});
  std::vector<std::vector<float>> results(kExperts, std::vector<float>(kLength * kWidth));
  std::vector<TensorView> outputs;
  for (std::size_t expert = 0; expert < kExperts; ++expert) {
    const ValueId activated = silu_mul(builder, given.gate_up.linear(builder, input, expert));
    builder.output(std::to_string(expert), given.down.linear(builder, activated, expert));
    outputs.push_back({results[expert].data(), "float32", {kLength, kWidth}, true, true});
  }
  const TensorView inputs[] = {{given.x.data(), "float32", {kLength, kWidth}, true, false}};
  builder.build()->run(inputs, outputs);
  return results;
}

void test_experts() {
  Case given;
  const std::vector<std::vector<float>> results = run_experts(given);
  for (const bool norm_topk_prob : {false, true}) {
    std::vector<float> expected(kLength * kWidth);
    for (std::size_t m = 0; m < kLength; ++m) {
      const float* logits = given.logits.data() + m * kExperts;
      const float probability = 1.0f / static_cast<float>(std::count(logits, logits + kExperts, 3.0f));
      const float weight =
          norm_topk_prob ? probability / (probability + probability + probability) : probability;
      std::size_t num_picked = 0;  // ties to the first
      for (std::size_t expert = 0; expert < kExperts && num_picked < kPicked; ++expert) {
        if (logits[expert] != 3.0f) continue;
        ++num_picked;
        for (std::size_t n = m * kWidth; n < (m + 1) * kWidth; ++n)
          expected[n] += weight * results[expert][n];
      }
    }
    for (const std::size_t chunk : {1u, 2u, 31u, 45u}) {
      for (const std::size_t budget : {1u, 2u, 5u}) {
        const std::vector<float> found = run(given, budget, chunk, norm_topk_prob);
        check_same(found.data(), expected.data(), found.size(),
                   std::to_string(budget) + " threads, chunks of " + std::to_string(chunk));
      }
    }
  }
}

}  // namespace

void test_routed_experts(Suite& suite) {
  suite.run("program: routed experts, any thread budget, any chunks", test_experts);
}

}  // namespace chunkrt::testing
