// Tests the sums of LoRA adapters in programs: the result of each row is bit-identical to its definition,
// regardless of other rows, the number of threads and other adapters of the chunk.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include "program/operators/operators.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kDepth = 70, kColumns = 83, kBlocks = 6, kLength = 45;
constexpr Dimension kRows = {Symbol::T};

// An adapter whose first rank_blocks * 16 / 2 ranks contribute to the first three blocks of columns, and the
// other ranks to the last three.
struct Factors {
  explicit Factors(std::size_t rank_blocks)
      : rank_blocks(rank_blocks),
        half(rank_blocks * 8),
        a(Random(1).floats(rank_blocks * kDepth * 16, 1.0f)),
        b(Random(2).floats(kBlocks * half * 16, 1.0f)) {
    for (std::size_t block = 0; block < kBlocks; ++block) {
      spans.push_back({.first_rank = block < 3 ? 0 : half, .num_ranks = half, .first_row = block * half});
    }
  }

  LowRankFactors view() const {
    return {.depth = kDepth,
            .columns = kColumns,
            .rank_blocks = rank_blocks,
            .a = a.data(),
            .b = b.data(),
            .spans = spans,
            .owner = nullptr};
  }

  void add_to(const float* x, float* out) const {
    std::vector<float> reduced(rank_blocks * 16);
    for (std::size_t j = 0; j < reduced.size(); ++j) {
      float parts[4] = {};
      for (std::size_t k = 0; k < kDepth; ++k) {
        float& part = parts[k / 18];  // ceil(70 / 4)
        part = std::fma(x[k], a[(j / 16 * kDepth + k) * 16 + j % 16], part);
      }
      reduced[j] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
    for (std::size_t n = 0; n < kColumns; ++n) {
      const LowRankSpan& span = spans[n / 16];
      for (std::size_t j = 0; j < span.num_ranks; ++j) {
        out[n] = std::fma(reduced[span.first_rank + j], b[(span.first_row + j) * 16 + n % 16], out[n]);
      }
    }
  }

  std::size_t rank_blocks, half;
  std::vector<float> a, b;
  std::vector<LowRankSpan> spans;
};

struct Case {
  Case() {
    tables->add(3, {{"weight", one.view()}});
    tables->add(8, {{"weight", three.view()}});
    tables->add(9, {{"another weight", one.view()}});
  }

  // A program that adds the products of adapters to its input `y`.
  std::unique_ptr<Program> program(std::size_t budget, std::size_t chunk) const {
    ProgramBuilder builder(std::make_shared<ThreadPool>(budget), chunk);
    const ValueId x = builder.input("x", Dtype::float32, {kRows, fixed(kDepth)});
    const ValueId y = builder.input("y", Dtype::float32, {kRows, fixed(kColumns)});
    const ValueId adapters = builder.input("adapters", Dtype::int64, {kRows});
    builder.output("out", low_rank_sum(builder, y, x, adapters, tables, "weight"));
    return builder.build();
  }

  std::vector<float> run(Program& program, std::vector<std::int64_t> adapters, std::size_t chunk) {
    std::vector<float> out(adapters.size() * kColumns);
    for (std::size_t start = 0; start < adapters.size(); start += chunk) {
      const std::size_t rows = std::min(chunk, adapters.size() - start);
      const TensorView inputs[] = {{x.data() + start * kDepth, "float32", {rows, kDepth}, true, false},
                                   {y.data() + start * kColumns, "float32", {rows, kColumns}, true, false},
                                   {adapters.data() + start, "int64", {rows}, true, false}};
      const TensorView outputs[] = {{out.data() + start * kColumns, "float32", {rows, kColumns}, true, true}};
      program.run(inputs, outputs);
    }
    return out;
  }

  std::vector<float> expected(const std::vector<std::int64_t>& adapters) const {
    std::vector<float> out = y;
    for (std::size_t m = 0; m < adapters.size(); ++m) {
      if (adapters[m] == 3) one.add_to(x.data() + m * kDepth, out.data() + m * kColumns);
      if (adapters[m] == 8) three.add_to(x.data() + m * kDepth, out.data() + m * kColumns);
    }
    return out;
  }

  Factors one{1}, three{3};
  std::shared_ptr<AdapterTables> tables = std::make_shared<AdapterTables>();
  std::vector<float> x = Random(3).floats(kLength * kDepth, 1.0f),
                     y = Random(4).floats(kLength * kColumns, 1.0f);
};

void test_rows() {
  Case given;
  std::vector<std::int64_t> adapters(kLength, 8);
  for (const auto& [first, last, number] :
       {std::array<std::size_t, 3>{0, 7, 0}, {7, 9, 3}, {9, 11, 9}, {20, 40, 3}}) {
    std::fill(adapters.begin() + static_cast<std::ptrdiff_t>(first),
              adapters.begin() + static_cast<std::ptrdiff_t>(last), number);
  }
  const std::vector<float> expected = given.expected(adapters);
  for (const std::size_t chunk : {1u, 2u, 4u, 5u, 31u, 45u}) {
    for (const std::size_t budget : {1u, 2u, 5u}) {
      const std::vector<float> found = given.run(*given.program(budget, chunk), adapters, chunk);
      check_same(found.data(), expected.data(), found.size(),
                 std::to_string(budget) + " threads, chunks of " + std::to_string(chunk));
    }
  }
}

void test_swap() {
  Case given;
  const auto program = given.program(2, kLength);
  const std::vector<std::int64_t> third(kLength, 3), tenth(kLength, 10);
  const auto is_refused = [&](const std::vector<std::int64_t>& adapters) {
    try {
      given.run(*program, adapters, kLength);
    } catch (const std::out_of_range& error) {
      return std::string(error.what()) == "adapter " + std::to_string(adapters[0]) + " is not loaded";
    }
    return false;
  };
  check(is_refused(tenth), "an adapter that is not loaded is refused");
  given.tables->add(10, {{"weight", given.three.view()}});
  const std::vector<float> expected = given.expected(std::vector<std::int64_t>(kLength, 8));
  check_same(given.run(*program, tenth, kLength).data(), expected.data(), expected.size(), "added adapter");
  given.tables->remove(3);
  check(is_refused(third), "a removed adapter is refused");
}

void test_refusals() {
  Case given;
  const auto is_refused = [](const auto& act) {
    try {
      act();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  check(is_refused([&] { given.tables->add(3, {}); }), "a number in use");
  check(is_refused([&] { given.tables->add(0, {}); }), "the number 0");
  const Factors many(kMaxAdapterRanks / 16 + 1);
  check(is_refused([&] { given.tables->add(4, {{"weight", many.view()}}); }), "too many ranks");
  LowRankFactors other = given.one.view();
  other.depth = kDepth - 1;
  given.tables->add(5, {{"weight", other}});
  const auto program = given.program(1, kLength);
  check(is_refused([&] { given.run(*program, std::vector<std::int64_t>(kLength, 5), kLength); }), "a shape");
}

}  // namespace

void test_low_rank_sum(Suite& suite) {
  suite.run("program: sums of adapters, any thread budget, any chunks, several adapters", test_rows);
  suite.run("program: adapters are added and removed without a change of the program", test_swap);
  suite.run("program: adapters that do not fit are refused", test_refusals);
}

}  // namespace chunkrt::testing
