// Tests a program with every operator: its results are bit-identical for all thread budgets, chunks and
// numbers of concurrent callers.
#include <algorithm>
#include <thread>
#include <vector>

#include "program/operators/operators.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kVocabulary = 50, kHidden = 48, kInner = 40, kHeads = 3, kKvHeads = 1, kHeadDim = 16;
constexpr std::size_t kLength = 95, kMaxRows = 40;
constexpr std::size_t kQkvWidth = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr Dimension kRows = {Symbol::T}, kLogitRows = {Symbol::R}, kPositions = {Symbol::P};

// Random constants, owned by the program that uses them.
class Constants {
 public:
  explicit Constants(ProgramBuilder& builder) : builder_(builder) {}

  ValueId floats(std::vector<std::size_t> shape, float limit) {
    const std::size_t count = shape.size() == 1 ? shape[0] : shape[0] * shape[1];
    const auto data = std::make_shared<std::vector<float>>(random_.floats(count, limit));
    return builder_.constant(data->data(), Dtype::float32, shape, data);
  }

  ValueId linear(ValueId input, std::size_t depth, std::size_t columns, std::optional<ValueId> residual) {
    return chunkrt::linear(builder_, input, packed(depth, columns), floats({columns}, 2e-3f),
                           floats({columns}, 0.1f), residual, 1);
  }

  ValueId block_linear(ValueId input, std::size_t depth, std::size_t columns) {
    const std::size_t blocks = (columns + 15) / 16;
    const auto halves = std::make_shared<std::vector<std::uint16_t>>(blocks * depth);
    for (std::uint16_t& half : *halves) half = static_cast<std::uint16_t>(random_.int8s(1)[0] & 0x9fff);
    const auto packed = std::make_shared<std::vector<std::uint8_t>>();
    for (const std::int8_t byte : random_.int8s(blocks * depth * 8)) {
      packed->push_back(static_cast<std::uint8_t>(byte));
    }
    const ValueId weight =
        builder_.constant(packed->data(), Dtype::uint8, {blocks, depth / 32, 4, 16, 4}, packed);
    const ValueId scales =
        builder_.constant(halves->data(), Dtype::float16, {blocks, depth / 32, 2, 16}, halves);
    return chunkrt::block_linear(builder_, input, weight, scales, columns, floats({columns}, 0.1f), {});
  }

  // On a static grid, of 8 or 16 bits.
  ValueId grid_linear(ValueId input, std::size_t depth, std::size_t columns, std::size_t num_digits) {
    const float step = num_digits == 2 ? 1e-4f : 0.03f;
    const ValueId sums = chunkrt::linear(builder_, input, packed(depth, columns), floats({columns}, 2e-3f),
                                         {}, {}, num_digits, step);
    return round_to_grid(builder_, sums, constant({step}), num_digits == 2 ? 32639 : 127);
  }

  // Rows 3 and 7 of the weight are hot; all inputs except the smallest ones are outliers.
  ValueId shadow_linear(ValueId input, std::size_t depth, std::size_t columns) {
    const auto hot = std::make_shared<std::vector<std::int32_t>>(std::initializer_list<std::int32_t>{3, 7});
    const ValueId hot_channels = builder_.constant(hot->data(), Dtype::int32, {hot->size()}, hot);
    return chunkrt::shadow_linear(builder_, input, packed(depth, columns), floats({columns}, 2e-3f), 1e-4f,
                                  hot_channels);
  }

  ValueId constant(std::vector<float> values) {
    const auto data = std::make_shared<std::vector<float>>(std::move(values));
    return builder_.constant(data->data(), Dtype::float32, {data->size()}, data);
  }

 private:
  ValueId packed(std::size_t depth, std::size_t columns) {
    const std::size_t blocks = (columns + 15) / 16, groups = (depth + 3) / 4;
    // All depths here are complete, and the padding of the last columns does not affect any result.
    const auto data = std::make_shared<std::vector<std::int8_t>>(random_.int8s(blocks * groups * 64));
    return builder_.constant(data->data(), Dtype::int8, {blocks, groups, 16, 4}, data);
  }

  ProgramBuilder& builder_;
  Random random_{1};
};

// One decoder layer between an embedding and an LM head.
std::unique_ptr<Program> build_decoder(std::size_t budget) {
  ProgramBuilder builder(std::make_shared<ThreadPool>(budget), kMaxRows);
  Constants constants(builder);
  const ValueId ids = builder.input("input_ids", Dtype::int64, {kRows});
  const ValueId position = builder.input("position", Dtype::int64, {fixed(1)});
  const ValueId logit_rows = builder.input("logit_rows", Dtype::int64, {kLogitRows});
  const Shape cache_shape = {fixed(kKvHeads), kPositions, fixed(kHeadDim)};
  const ValueId key_cache = builder.state("key_cache", cache_shape);
  const ValueId value_cache = builder.state("value_cache", cache_shape);

  const ValueId hidden = gather(builder, constants.floats({kVocabulary, kHidden}, 1.0f), ids);
  const ValueId normed = rms_norm(builder, hidden, constants.floats({kHidden}, 1.0f), 1e-5f);
  const ValueId qkv = constants.linear(normed, kHidden, kQkvWidth, std::nullopt);
  const ValueId cos = constants.floats({kLength, kHeadDim / 2}, 1.0f);
  const ValueId sin = constants.floats({kLength, kHeadDim / 2}, 1.0f);
  const ValueId attended =
      attention(builder, qkv, position, position, cos, sin, key_cache, value_cache,
                {.num_heads = kHeads, .num_kv_heads = kKvHeads, .head_dim = kHeadDim, .scale = 0.25f});
  const ValueId residual = constants.linear(attended, kHeads * kHeadDim, kHidden, hidden);
  const ValueId mlp_in = rms_norm(builder, residual, constants.floats({kHidden}, 1.0f), 1e-5f);
  const ValueId gate_up = constants.linear(mlp_in, kHidden, 2 * kInner, std::nullopt);
  const ValueId gate = columns(builder, gate_up, 0, kInner), up = columns(builder, gate_up, kInner, kInner);
  const ValueId apart = mul(builder, mul(builder, gate, sigmoid(builder, gate)), up);
  const ValueId inner = add(builder, silu_mul(builder, gate_up), apart);
  const ValueId dynamic = constants.linear(inner, kInner, kHidden, residual);
  const ValueId grids = add(builder, constants.grid_linear(inner, kInner, kHidden, 1),
                            constants.grid_linear(inner, kInner, kHidden, 2));
  const ValueId whole_block = columns(builder, inner, 0, 32);
  const ValueId in_blocks = constants.block_linear(whole_block, 32, kHidden);
  const ValueId out = add(builder, add(builder, add(builder, dynamic, grids), in_blocks),
                          constants.shadow_linear(inner, kInner, kHidden));
  builder.output("logits",
                 constants.linear(gather(builder, out, logit_rows), kHidden, kVocabulary, std::nullopt));
  return builder.build();
}

// Returns the logits of every row of a prompt that is run in chunks.
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

// Compares a linear on a grid with 64-bit sums, at depths at which the sums of the digits stay exact in
// float32.
void test_static_linear() {
  constexpr std::size_t kMaxDepth = 1032;  // 128 * 127 * 1032 < 2^24
  for (const std::size_t depth : {1u, 3u, 4u, 31u, 33u, 576u, 1032u}) {
    for (const std::size_t columns : {1u, 15u, 16u, 17u, 49u}) {
      for (const std::size_t num_digits : {1u, 2u}) {
        const std::size_t rows = depth % 7 + 1, groups = (depth + 3) / 4, blocks = (columns + 15) / 16;
        const std::int64_t levels = num_digits == 2 ? 32639 : 127;
        const bool at_the_ends = depth == kMaxDepth;
        Random random(static_cast<std::uint32_t>(depth * 64 + columns));
        std::vector<std::int8_t> weight = random.int8s(depth * columns), packed(blocks * groups * 64);
        for (std::int8_t& w : weight) w = at_the_ends ? std::int8_t{127} : std::max(w, std::int8_t{-127});
        for (std::size_t k = 0; k < depth; ++k) {
          for (std::size_t n = 0; n < columns; ++n) {
            packed[((n / 16 * groups + k / 4) * 16 + n % 16) * 4 + k % 4] = weight[k * columns + n];
          }
        }
        std::vector<float> x = random.floats(rows * depth, 1.2f), scales = random.floats(columns, 1e-3f);
        if (at_the_ends) std::fill(x.begin(), x.end(), -9.0f);
        const float step = 1.0f / static_cast<float>(levels);

        ProgramBuilder builder(std::make_shared<ThreadPool>(2), rows);
        const ValueId input = builder.input("x", Dtype::float32, {kRows, fixed(depth)});
        const ValueId weights =
            builder.constant(packed.data(), Dtype::int8, {blocks, groups, 16, 4}, nullptr);
        const ValueId column_scales = builder.constant(scales.data(), Dtype::float32, {columns}, nullptr);
        builder.output("y",
                       chunkrt::linear(builder, input, weights, column_scales, {}, {}, num_digits, step));
        std::vector<float> found(rows * columns), expected(rows * columns);
        const TensorView inputs[] = {{x.data(), "float32", {rows, depth}, true, false}};
        const TensorView outputs[] = {{found.data(), "float32", {rows, columns}, true, true}};
        builder.build()->run(inputs, outputs);

        for (std::size_t m = 0; m < rows; ++m) {
          for (std::size_t n = 0; n < columns; ++n) {
            std::int64_t sum = 0;
            for (std::size_t k = 0; k < depth; ++k) {
              const auto q = static_cast<std::int64_t>(std::nearbyint(x[m * depth + k] / step));
              sum += std::clamp(q, -levels, levels) * weight[k * columns + n];
            }
            expected[m * columns + n] = static_cast<float>(sum) * (step * scales[n]);
          }
        }
        check_same(found.data(), expected.data(), found.size(),
                   std::to_string(depth) + " x " + std::to_string(columns) + ", " +
                       std::to_string(num_digits) + " digits");
      }
    }
  }
}

// y[t, n] = sum over k of r[t, k] * row k of the weight, in float32 and in that order.
std::vector<float> shadow(const std::vector<float>& x, const std::vector<std::int8_t>& weight,
                          const std::vector<float>& scales, std::size_t depth, float step) {
  const std::size_t rows = x.size() / depth, columns = scales.size();
  std::vector<float> result(rows * columns);
  for (std::size_t t = 0; t < rows; ++t) {
    for (std::size_t k = 0; k < depth; ++k) {
      const float value = x[t * depth + k], q = std::nearbyint(value / step);
      const float left = std::fabs(q) > 127.0f ? value - std::clamp(q, -127.0f, 127.0f) * step : 0.0f;
      for (std::size_t n = 0; n < columns; ++n) {
        const float right = static_cast<float>(weight[k * columns + n]) * scales[n];
        result[t * columns + n] += left * right;
      }
    }
  }
  return result;
}

// Tests weights whose rows are all, partly or not hot, and inputs with no outliers to only outliers.
void test_shadow_linear() {
  for (const std::size_t depth : {1u, 5u, 16u, 33u, 130u}) {
    for (const std::size_t columns : {1u, 15u, 17u, 300u}) {
      Random random(static_cast<std::uint32_t>(depth));
      const std::size_t rows = 6, groups = (depth + 3) / 4, blocks = (columns + 15) / 16;
      const std::vector<std::int8_t> weight = random.int8s(depth * columns);
      std::vector<std::int8_t> packed(blocks * groups * 64);
      for (std::size_t k = 0; k < depth; ++k) {
        for (std::size_t n = 0; n < columns; ++n) {
          packed[((n / 16 * groups + k / 4) * 16 + n % 16) * 4 + k % 4] = weight[k * columns + n];
        }
      }
      std::vector<float> x = random.floats(rows * depth, 1.0f), scales = random.floats(columns, 1e-2f);
      std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(depth), depth, 0.0f);
      for (const std::size_t hot_distance : {1u, 3u, 1000u}) {
        std::vector<std::int32_t> hot;
        for (std::size_t k = hot_distance - 1; k < depth; k += hot_distance) {
          hot.push_back(static_cast<std::int32_t>(k));
        }
        for (const float step : {1e-20f, 0.004f, 0.0078f, 1.0f}) {
          ProgramBuilder builder(std::make_shared<ThreadPool>(3), rows);
          const ValueId input = builder.input("x", Dtype::float32, {kRows, fixed(depth)});
          const ValueId weights =
              builder.constant(packed.data(), Dtype::int8, {blocks, groups, 16, 4}, nullptr);
          const ValueId column_scales = builder.constant(scales.data(), Dtype::float32, {columns}, nullptr);
          const ValueId hot_channels = builder.constant(hot.data(), Dtype::int32, {hot.size()}, nullptr);
          builder.output("y",
                         chunkrt::shadow_linear(builder, input, weights, column_scales, step, hot_channels));
          std::vector<float> found(rows * columns, 99.0f);
          const TensorView inputs[] = {{x.data(), "float32", {rows, depth}, true, false}};
          const TensorView outputs[] = {{found.data(), "float32", {rows, columns}, true, true}};
          builder.build()->run(inputs, outputs);
          check_same(found.data(), shadow(x, weight, scales, depth, step).data(), found.size(),
                     std::to_string(depth) + " x " + std::to_string(columns) + ", " +
                         std::to_string(hot.size()) + " hot channels, step " + std::to_string(step));
        }
      }
    }
  }
}

// Values whose size overflows std::size_t raise an error, instead of getting too little memory.
void test_too_large() {
  const auto check_refused = [](const std::function<void()>& act, const std::string& what) {
    try {
      act();
    } catch (const std::invalid_argument& error) {
      const bool is_named = std::string(error.what()).find("bytes") != std::string::npos;
      return check(is_named, [&] { return what + ": " + error.what(); });
    }
    throw Failure(what + " was not refused");
  };
  constexpr std::size_t kHuge = std::size_t{1} << 61;
  const auto pool = std::make_shared<ThreadPool>(1);
  for (const std::size_t rows : {std::size_t{1} << 44, kHuge, kHuge + 1, ~std::size_t{0}}) {
    ProgramBuilder builder(pool, rows);
    const std::string what = std::to_string(rows) + " rows";
    check_refused([&] { builder.input("x", Dtype::float32, {kRows, fixed(8)}); }, what);
    check_refused([&] { builder.temporary(Dtype::float32, {kRows, fixed(8)}); }, what);
    check_refused([&] { builder.temporary(Dtype::int8, {fixed(32), kLogitRows}); }, what);
  }
  ProgramBuilder builder(pool, 4);
  check_refused([&] { builder.input("x", Dtype::float32, {kRows, fixed(kHuge)}); }, "a width");
  check_refused([&] { builder.state("s", {fixed(kHuge), kPositions, fixed(8)}); }, "a state");
  check_refused([&] { builder.constant(nullptr, Dtype::int8, {0, ~std::size_t{0}}, nullptr); }, "no rows");
  check_refused([&] { builder.constant(nullptr, Dtype::int8, {kHuge, 16, 4}, nullptr); }, "a packed weight");
}

}  // namespace

void test_program(Suite& suite) {
  suite.run("program: any thread budget, any chunks", test_budgets_and_chunks);
  suite.run("program: concurrent callers", test_callers_together);
  suite.run("program: a linear on a static grid", test_static_linear);
  suite.run("program: the shadow of a linear", test_shadow_linear);
  suite.run("program: sizes that exceed the address space", test_too_large);
}

}  // namespace chunkrt::testing
