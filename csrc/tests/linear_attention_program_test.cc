// Tests linear attention in programs: all thread budgets give bit-identical results, and the state connects
// chunks.
#include <algorithm>
#include <vector>

#include "program/operators/operators.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kKeyHeads = 2, kValueHeads = 6, kKeyDim = 16, kValueDim = 24, kTaps = 4, kLength = 70;
constexpr std::size_t kWidth = kValueHeads * kValueDim, kChannels = 2 * kKeyHeads * kKeyDim + kWidth;
constexpr Dimension kRows = {Symbol::T};

ValueId random_constant(ProgramBuilder& builder, std::vector<std::size_t> shape, std::uint32_t seed) {
  std::size_t count = 1;
  for (const std::size_t size : shape) count *= size;
  const auto data = std::make_shared<std::vector<float>>(Random(seed).floats(count, 0.5f));
  return builder.constant(data->data(), Dtype::float32, shape, data);
}

// A program of the delta rule, followed by a short convolution of a third of its result.
std::unique_ptr<Program> build(std::size_t budget) {
  ProgramBuilder builder(std::make_shared<ThreadPool>(budget), kLength);
  const ValueId qkv = builder.input("qkv", Dtype::float32, {kRows, fixed(kChannels)});
  const ValueId a = builder.input("a", Dtype::float32, {kRows, fixed(kValueHeads)});
  const ValueId first_columns = builder.state("first_columns", {fixed(kChannels), fixed(kTaps - 1)});
  const ValueId state = builder.state("state", {fixed(kValueHeads), fixed(kKeyDim), fixed(kValueDim)});
  const ValueId second_columns = builder.state("second_columns", {fixed(kWidth / 3), fixed(kTaps - 1)});
  const auto minus_one = std::make_shared<std::vector<float>>(kValueHeads, -1.0f);
  const ValueId signs = builder.constant(minus_one->data(), Dtype::float32, {kValueHeads}, minus_one);
  const ValueId gate = mul(builder, softplus(builder, a), signs);
  const ValueId attended = gated_delta_rule(
      builder, qkv, gate, sigmoid(builder, a), random_constant(builder, {kChannels, 1, kTaps}, 1), {},
      first_columns, state, {kKeyHeads, kValueHeads, kKeyDim, kValueDim, true});
  const ValueId normed =
      head_norm(builder, attended, random_constant(builder, {kValueHeads, kValueDim}, 2), 1e-6f);
  builder.output("y", short_conv(builder, gelu(builder, tanh(builder, normed)),
                                 random_constant(builder, {kWidth / 3, 1, kTaps}, 3),
                                 random_constant(builder, {kWidth / 3}, 4), second_columns));
  return builder.build();
}

std::vector<float> run(Program& program, std::size_t chunk) {
  std::vector<float> qkv = Random(5).floats(kLength * kChannels, 2.0f);
  std::vector<float> a = Random(6).floats(kLength * kValueHeads, 2.0f), out(kLength * kWidth / 3);
  std::vector<float> first_columns(kChannels * (kTaps - 1)), second_columns(kWidth / 3 * (kTaps - 1));
  std::vector<float> state(kValueHeads * kKeyDim * kValueDim);
  for (std::size_t start = 0; start < kLength; start += chunk) {
    const std::size_t rows = std::min(chunk, kLength - start);
    const TensorView inputs[] = {
        {qkv.data() + start * kChannels, "float32", {rows, kChannels}, true, false},
        {a.data() + start * kValueHeads, "float32", {rows, kValueHeads}, true, false},
        {first_columns.data(), "float32", {kChannels, kTaps - 1}, true, true},
        {state.data(), "float32", {kValueHeads, kKeyDim, kValueDim}, true, true},
        {second_columns.data(), "float32", {kWidth / 3, kTaps - 1}, true, true}};
    const TensorView outputs[] = {
        {out.data() + start * kWidth / 3, "float32", {rows, kWidth / 3}, true, true}};
    program.run(inputs, outputs);
  }
  return out;
}

void test_budgets_and_chunks() {
  for (const std::size_t chunk : {1u, 31u, 32u, 33u, 70u}) {
    const std::vector<float> expected = run(*build(1), chunk);
    for (const std::size_t budget : {2u, 3u, 8u}) {
      check_same(run(*build(budget), chunk).data(), expected.data(), expected.size(),
                 std::to_string(budget) + " threads, chunks of " + std::to_string(chunk));
    }
    const std::vector<float> whole = run(*build(1), kLength);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      check(std::fabs(expected[i] - whole[i]) <= 1e-5f, [&] {
        return "chunks of " + std::to_string(chunk) + ": element " + std::to_string(i) + " is " +
               std::to_string(expected[i]) + ", in one chunk " + std::to_string(whole[i]);
      });
    }
  }
}

}  // namespace

void test_linear_attention_program(Suite& suite) {
  suite.run("program: linear attention, any thread budget, any chunks", test_budgets_and_chunks);
}

}  // namespace chunkrt::testing
