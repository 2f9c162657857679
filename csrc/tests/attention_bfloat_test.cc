// Compares attention in bfloat16 with double precision, on original and on rounded operands. On one
// instruction set, neither splits nor chunks may change the result.
#include "tests/attention_bfloat.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "kernels/attention/tile_operations.h"
#include "kernels/dispatch.h"
#include "tests/attention_values.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr double kUnit = 0x1p-24;       // half a unit in the last place of float32
constexpr double kBfloatUnit = 0x1p-9;  // and of bfloat16
constexpr float kLargeBfloat = 0x1.fep+127f;
const double kVanishing = std::exp(-static_cast<double>(kExpLimit));

// Rounds to nearest even: to a multiple of 2^(e - 7) in [2^e, 2^(e + 1)), and to a multiple of 2^-133 below
// 2^-126.
double rounded_to_bfloat(double value) {
  if (!std::isfinite(value)) return value;
  const int exponent = value == 0.0 ? -126 : std::max(std::ilogb(value), -126);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, 7 - exponent)), exponent - 7);
  return std::fabs(rounded) > static_cast<double>(kLargeBfloat)
             ? std::copysign(std::numeric_limits<double>::infinity(), value)
             : rounded;
}

// The columns of a head, roped and multiplied by `scale` in float32 as in attention.h.
std::vector<double> roped_in_float(const Prompt& prompt, std::size_t position,
                                   const std::vector<double>& values, float scale) {
  const std::size_t half = prompt.shape.rotary_dim / 2, table_row = prompt.shape.first_table_row + position;
  std::vector<double> out(values.size());
  for (std::size_t d = 0; d < values.size(); ++d)
    out[d] = static_cast<double>(static_cast<float>(values[d]) * scale);
  for (std::size_t i = 0; i < half; ++i) {
    const float cos = prompt.cos[table_row * half + i], sin = prompt.sin[table_row * half + i];
    const float first = static_cast<float>(values[i]), second = static_cast<float>(values[i + half]);
    out[i] = static_cast<double>(std::fma(first, cos, -(second * sin)) * scale);
    out[i + half] = static_cast<double>(std::fma(second, cos, first * sin) * scale);
  }
  return out;
}

std::vector<double> each_rounded(std::vector<double> values) {
  std::transform(values.begin(), values.end(), values.begin(), rounded_to_bfloat);
  return values;
}

// With rounded operands, the remaining errors are the roundings of sums to float32 and of weights to
// bfloat16; otherwise each operand also has an error of one bfloat16 unit.
void check_output(const Prompt& prompt, const Result& result, bool are_rounded) {
  const Shape& s = prompt.shape;
  const auto operand = [&](const std::vector<double>& values) {
    return are_rounded ? each_rounded(values) : values;
  };
  const double dims = static_cast<double>(s.head_dim);
  for (std::size_t kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) {
    std::vector<std::vector<double>> keys, values;
    for (std::size_t row = 0; row < s.length; ++row) {
      std::vector<double> key = cached(result.keys, s, kv_head, row, true),
                          value = cached(result.values, s, kv_head, row, false);
      for (double& x : key) x = static_cast<double>(static_cast<float>(x));
      for (double& x : value) x = static_cast<double>(static_cast<float>(x));
      keys.push_back(operand(s.has_raw_keys ? roped_in_float(prompt, key_position(s, row), key, 1.0f) : key));
      values.push_back(operand(value));
    }
    const std::size_t group = s.num_heads / s.num_kv_heads;
    for (std::size_t index = 0; index < s.length * group; ++index) {
      const std::size_t row = index / group, head = kv_head * group + index % group;
      const std::size_t first_key = s.window > 0 && row + 1 > s.window ? row + 1 - s.window : 0;
      const double num_keys = static_cast<double>(row + 1 - first_key);
      const std::vector<double> raw_query = head_of(prompt, row, head * s.head_dim);
      std::vector<double> query;
      std::vector<double> weights(row + 1);
      double largest_sum = 0.0, max = sink_of(s, head);
      for (std::size_t key = first_key; key <= row; ++key) {
        double sum_of_magnitudes = 0.0;
        if (key == first_key || s.chunks.period > 0) {
          query = operand(roped_in_float(prompt, query_position(s, row, key), raw_query, scale_of(s)));
        }
        for (std::size_t d = 0; d < s.head_dim; ++d) {
          weights[key] += query[d] * keys[key][d];
          sum_of_magnitudes += std::fabs(query[d] * keys[key][d]);
        }
        largest_sum = std::max(largest_sum, sum_of_magnitudes);
        weights[key] = capped(s, weights[key]);
        max = std::max(max, weights[key]);
      }
      double sum = std::exp(sink_of(s, head) - max);
      for (std::size_t key = first_key; key <= row; ++key) sum += weights[key] = std::exp(weights[key] - max);
      // This is the maximum error of scores. The relative error of weights is twice as large (that of the
      // score and that of the maximum), plus the roundings of exp, of the rescaling of each block and of the
      // sums, plus one unit for the rounding of the weight; the sum consists of the same rounded weights.
      const double unit = are_rounded ? 0.0 : kBfloatUnit;
      const double of_cap = s.soft_cap > 0.0f ? 0x1p-20 : 0.0;
      const double score_error = ((dims + 8.0) * kUnit + of_cap + 2.0 * unit + unit * unit) * largest_sum;
      const double relative_error = 2.0 * std::expm1(2.0 * score_error) + (2.0 * num_keys + 32.0) * kUnit +
                                    2.02 * kBfloatUnit + 1.02 * unit;
      for (double& weight : weights) weight /= sum;
      for (std::size_t d = 0; d < s.head_dim; ++d) {
        double expected = 0.0, magnitude = 0.0, vanished = 0.0;
        for (std::size_t key = first_key; key <= row; ++key) {
          expected += weights[key] * values[key][d];
          magnitude += weights[key] * std::fabs(values[key][d]);
          vanished += kVanishing * std::fabs(values[key][d]);
        }
        const double found = static_cast<double>(result.out[row * out_width(s) + head * s.head_dim + d]);
        if (std::fabs(found - expected) <= relative_error * magnitude + vanished) continue;
        throw Failure("row " + std::to_string(row) + ", head " + std::to_string(head) + ", dim " +
                      std::to_string(d) + " is " + std::to_string(found) + ", expected " +
                      std::to_string(expected) + " within " + std::to_string(relative_error * magnitude));
      }
    }
  }
}

// Also tests scores of tens and hundreds, for which rounding a key or a query shifts the weights by more than
// the bound.
void test_truth(const Kernels& kernels) {
  for (const Shape& shape : kShapes) {
    for (const float limit : {2.0f, 20.0f}) {
      const Prompt prompt(shape, limit);
      const Result result = attend_prompt(prompt, kernels);
      try {
        check_output(prompt, result, true);
        if (limit == 2.0f) check_output(prompt, result, false);
      } catch (const Failure& failure) {
        throw Failure(describe(shape) + ", up to " + std::to_string(limit) + ": " + failure.what());
      }
    }
  }
}

void check_same_output(const Result& found, const Result& expected, const std::string& what) {
  check_same(found.out.data(), expected.out.data(), expected.out.size(), what);
}

void test_splits(const Kernels& kernels) {
  for (const Shape& shape : kShapes) {
    const Prompt prompt(shape);
    const Result expected = attend_prompt(prompt, kernels);
    for (const std::size_t chunk : {1u, 31u, 32u, 33u, 64u, 95u}) {
      if (!has_time_for(kernels, shape, chunk)) continue;
      check_same_output(attend_prompt(prompt, kernels, {.chunk = chunk}), expected,
                        describe(shape) + ", chunks of " + std::to_string(chunk));
    }
    check_same_output(attend_prompt(prompt, kernels, {.items_per_call = 1, .is_backwards = true}), expected,
                      describe(shape) + ", item by item from the last");
  }
}

// A cache in tile layout gives results that are bit-identical to those of a float32 cache, which is rounded
// on reading.
void test_tiled_cache(const Kernels& kernels) {
  for (const Shape& shape : kTiledShapes) {
    Shape in_float = shape;
    in_float.cache_type = CacheType::float32;
    const Result expected = attend_prompt(Prompt(in_float), kernels);
    const Prompt prompt(shape);
    for (const std::size_t chunk : {1u, 31u, 32u, 33u, 64u, 95u, 1000u}) {
      if (kernels.are_caught && chunk != 33 && chunk != 1000) continue;
      const std::string what = describe(shape) + ", chunks of " + std::to_string(chunk);
      check_same_output(attend_prompt(prompt, kernels, {.chunk = chunk}), expected, what);
      if (shape.window == 0) continue;
      check_same_output(attend_prompt(prompt, kernels, {.chunk = chunk, .is_ring = true}), expected,
                        what + ", a ring");
    }
    check_same_output(attend_prompt(prompt, kernels, {.items_per_call = 1, .is_backwards = true}), expected,
                      describe(shape) + ", item by item from the last");
    for (const std::size_t queries : {1u, 21u, 64u}) {
      if (kernels.are_caught && queries != 64) continue;
      check_same_output(attend_prompt(prompt, kernels, {.queries_per_item = queries}), expected,
                        describe(shape) + ", items of " + std::to_string(queries) + " queries");
    }
  }
}

// A cache in tile layout contains the input of each position, roped and rounded.
void test_append_to_tiles(AttentionFunction* append) {
  const Kernels kernels = {append, attend_f32_bf16_cache_reference, AttentionMath::bfloat16};
  for (const Shape& shape : kTiledShapes) {
    const Prompt prompt(shape);
    const Result result = attend_prompt(prompt, kernels, {.chunk = 33, .is_backwards = true});
    for (std::size_t head = 0; head < shape.num_kv_heads; ++head) {
      for (std::size_t row = 0; row < shape.length; ++row) {
        const std::size_t column = (shape.num_heads + head) * shape.head_dim;
        const std::vector<double> key = head_of(prompt, row, column),
                                  value = head_of(prompt, row, column + shape.num_kv_heads * shape.head_dim);
        const std::string what = describe(shape) + ", position " + std::to_string(row) + " is wrong";
        check(cached(result.keys, shape, head, row, true) ==
                  each_rounded(roped_in_float(prompt, key_position(shape, row), key, 1.0f)),
              "a key: " + what);
        check(cached(result.values, shape, head, row, false) == each_rounded(value), "a value: " + what);
      }
    }
  }
}

// Tests the rounding of every normal bfloat16, of the midpoints between adjacent ones, and of the floats next
// to these midpoints.
struct Roundings {
  std::vector<float> inputs;
  std::vector<double> expected;
};

Roundings all_roundings() {
  Roundings found;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    const std::uint32_t bits = upper << 16 | 0x8000u;
    for (const std::uint32_t each : {bits - 0x8000u, bits - 1, bits, bits + 1}) {
      const float value = std::bit_cast<float>(each);
      const double rounded = rounded_to_bfloat(static_cast<double>(value));
      if (std::fabs(rounded) < 0x1p-126 || !std::isfinite(rounded)) continue;
      found.inputs.push_back(value);
      found.expected.push_back(rounded);
    }
  }
  return found;
}

// The first row attends only to itself, so its output is its rounded value.
void test_rounding(const Kernels& kernels, CacheType type) {
  static const Roundings all = all_roundings();
  const std::size_t head_dim = all.inputs.size();
  Prompt prompt({1, 1, head_dim, 0, 1, type});
  std::fill_n(prompt.qkv.data(), 2 * head_dim, 0.0f);
  std::copy(all.inputs.begin(), all.inputs.end(), prompt.qkv.data() + 2 * head_dim);
  const Result result = attend_prompt(prompt, kernels);
  for (std::size_t i = 0; i < head_dim; ++i) {
    check(static_cast<double>(result.out[i]) == all.expected[i], [&] {
      return std::to_string(all.inputs[i]) + " became " + std::to_string(result.out[i]) + ", expected " +
             std::to_string(all.expected[i]);
    });
  }
}

// A score is one product of a query and a key, 4 * k, the other score 0; one of the values is 1. So the
// output reveals the bfloat16 to which k was rounded, for every place of its key and dimension in a packed
// block.
void test_rounded_keys(const Kernels& kernels) {
  constexpr std::size_t kRows = 70, kDims = 80;
  const Shape shape = {1, 1, kDims, 0, kRows, CacheType::float32};
  for (std::size_t d = 0; d < kDims; ++d) {
    const std::size_t other = (d * 37 + 1) % (kRows - 1), row = kRows - 1;
    Prompt prompt(shape);
    std::fill_n(prompt.qkv.data(), prompt.qkv.size(), 0.0f);
    const float scale = scale_of(shape), key = 1.0f + static_cast<float>(2 * d + 1) * 0x1p-9f;
    float* const query = prompt.qkv.data() + row * row_width(shape);
    query[d] = 512.0f;
    for (std::size_t each = 0; each < kRows; ++each) {
      prompt.qkv[each * row_width(shape) + kDims + d] = each == other ? key : 1.0f;
    }
    prompt.qkv[other * row_width(shape) + 2 * kDims + d] = 1.0f;
    const double rounded_query = rounded_to_bfloat(static_cast<double>(512.0f * scale));
    const double difference = rounded_query * (rounded_to_bfloat(static_cast<double>(key)) - 1.0);
    const double expected = 1.0 / (1.0 + static_cast<double>(kRows - 1) * std::exp(-difference));
    const Result result = attend_prompt(prompt, kernels);
    const double found = static_cast<double>(result.out[row * kDims + d]);
    // Products are exact. The argument of e has a rounding error of 2^-24 of a score below 128, and a weight
    // is rounded to bfloat16, after an error of at most 2^-13.
    check(std::fabs(found - expected) <= expected * (2.02 * kBfloatUnit + 256.0 * kUnit + 0x1p-13), [&] {
      return "dim " + std::to_string(d) + " of key " + std::to_string(other) + " gives " +
             std::to_string(found) + ", expected " + std::to_string(expected);
    });
  }
}

// Weights below a bfloat16's smallest normal do not occur, because e(x) is 0 from e^-87 on; a value may be
// smaller.
void test_vanishing_values(const Kernels& kernels) {
  const Shape shape = {1, 1, 16, 0, 66, CacheType::float32};
  Prompt prompt(shape);
  for (std::size_t row = 0; row < shape.length; ++row) {
    std::fill_n(prompt.qkv.data() + row * row_width(shape) + 2 * shape.head_dim, shape.head_dim, -0x1p-140f);
  }
  const Result expected = attend_prompt(prompt, kernels);
  for (const float x : expected.out) check(std::fabs(x) <= 0x1p-126f, "a vanishing value has grown");
  check_same_output(attend_prompt(prompt, kernels, {.chunk = 1}), expected, "row by row");
}

#if defined(__x86_64__) || defined(_M_X64)
// The weights and rescaled sums of rows of scores.
struct Weighed {
  std::vector<float> scores, outs, maxima, sums;
  std::vector<std::uint16_t> weights;
};

// Random rows of a block that follows other blocks. The first row attends to the keys [first, visible); later
// rows attend to other keys, or to none.
Weighed weigh_random_rows(const TileOperations& operations, std::size_t num_rows, std::size_t first,
                          std::size_t visible) {
  constexpr std::size_t kColumns = 80;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Random random(static_cast<std::uint32_t>(num_rows + 100 * first + 10000 * visible));
  Weighed rows = {random.floats(num_rows * kKeysPerBlock, 100.0f), random.floats(num_rows * kColumns, 2.0f),
                  random.floats(num_rows, 100.0f), random.floats(num_rows, 2.0f),
                  std::vector<std::uint16_t>(num_rows * kKeysPerBlock)};
  std::size_t place = 41 * (first + visible);
  for (const float special : {kNan, kInfinity, -kInfinity, 0.0f, -0.0f}) {
    rows.scores[place++ * 41 % rows.scores.size()] = special;
  }
  rows.maxima[place % num_rows] = -kInfinity;
  std::vector<std::size_t> firsts, ends;
  for (std::size_t row = 0; row < num_rows; ++row) {
    firsts.push_back((first + row * 13) % kKeysPerBlock);
    ends.push_back((visible + row * 29) % (kKeysPerBlock + 1));
  }
  operations.weigh({.scores = rows.scores.data(),
                    .weights = rows.weights.data(),
                    .outs = rows.outs.data(),
                    .maxima = rows.maxima.data(),
                    .sums = rows.sums.data(),
                    .first = firsts.data(),
                    .visible = ends.data(),
                    .is_whole = false,
                    .num_rows = num_rows,
                    .columns = kColumns,
                    .soft_cap = 0.0f});
  return rows;
}

// The implementations of the operations around the tiles give bit-identical results.
void test_operations() {
  const TileOperations expected_by = tile_operations_avx2(), found_by = tile_operations_avx512vnni();
  for (const std::size_t num_rows : {1u, 7u, 16u, 17u, 32u}) {
    for (std::size_t first = 0; first < kKeysPerBlock; first += 7) {
      for (std::size_t visible = 0; visible <= kKeysPerBlock; visible += visible < 60 ? 5 : 1) {
        const Weighed expected = weigh_random_rows(expected_by, num_rows, first, visible);
        const Weighed found = weigh_random_rows(found_by, num_rows, first, visible);
        const std::string what = std::to_string(num_rows) + " rows that see keys from " +
                                 std::to_string(first) + " to before " + std::to_string(visible);
        check(found.weights == expected.weights, "weights of " + what);
        check_same(found.outs.data(), expected.outs.data(), expected.outs.size(), "outputs of " + what);
        check_same(found.maxima.data(), expected.maxima.data(), num_rows, "maxima of " + what);
        check_same(found.sums.data(), expected.sums.data(), num_rows, "sums of " + what);
      }
    }
  }
  // Tests every upper half of a float32, with lower halves at and next to half a bfloat16 unit.
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x7fffu, 0x8000u, 0x8001u}) {
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  std::vector<std::uint16_t> expected(values.size()), found(values.size());
  expected_by.round(values.data(), expected.data(), values.size());
  found_by.round(values.data(), found.data(), values.size());
  check(found == expected, "roundings");

  constexpr std::size_t kDims = 80;
  const std::vector<float> input = Random(1).floats(kDims, 4.0f), angles = Random(2).floats(kDims, 1.0f);
  for (const std::size_t rotary_dim : {0u, 2u, 30u, 64u, 80u}) {
    std::vector<float> expected_row(kDims), found_row(kDims);
    expected_by.rope(input.data(), angles.data(), angles.data() + kDims / 2, kDims, rotary_dim, 0.37f,
                     expected_row.data());
    found_by.rope(input.data(), angles.data(), angles.data() + kDims / 2, kDims, rotary_dim, 0.37f,
                  found_row.data());
    check_same(found_row.data(), expected_row.data(), kDims, "rope of " + std::to_string(rotary_dim));
  }
}

// Weights of rows that see a complete block have the relative error of attention.h, for maxima of any size,
// and do not depend on whether the caller knows that the rows see all keys.
void test_weights_by_pairs() {
  const TileOperations operations = tile_operations_avx512bf16();
  constexpr std::size_t kRows = 48, kColumns = 32;
  for (const float offset : {0.0f, -1e3f, 1e5f}) {
    Random random(7);
    std::vector<float> scores = random.floats(kRows * kKeysPerBlock, 12.0f);
    for (float& score : scores) score += offset;
    std::vector<float> maxima = random.floats(kRows, 12.0f);
    for (float& maximum : maxima) maximum += offset;
    const std::vector<std::size_t> first(kRows, 0), visible(kRows, kKeysPerBlock);
    Weighed found[2];
    for (const bool is_whole : {false, true}) {
      Weighed& rows = found[is_whole];
      rows = {scores, Random(8).floats(kRows * kColumns, 2.0f), maxima, Random(9).floats(kRows, 2.0f),
              std::vector<std::uint16_t>(kRows * kKeysPerBlock)};
      operations.weigh({.scores = rows.scores.data(),
                        .weights = rows.weights.data(),
                        .outs = rows.outs.data(),
                        .maxima = rows.maxima.data(),
                        .sums = rows.sums.data(),
                        .first = first.data(),
                        .visible = visible.data(),
                        .is_whole = is_whole,
                        .num_rows = kRows,
                        .columns = kColumns,
                        .soft_cap = 0.0f});
    }
    check(found[0].weights == found[1].weights, "weights of whole blocks");
    check_same(found[1].outs.data(), found[0].outs.data(), found[0].outs.size(), "outputs of whole blocks");
    check_same(found[1].maxima.data(), found[0].maxima.data(), kRows, "maxima of whole blocks");
    check_same(found[1].sums.data(), found[0].sums.data(), kRows, "sums of whole blocks");
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const float maximum = found[0].maxima[i / kKeysPerBlock];
      const double truth = std::exp(static_cast<double>(scores[i] - maximum));
      const float weight = std::bit_cast<float>(static_cast<std::uint32_t>(found[0].weights[i]) << 16);
      check(std::fabs(static_cast<double>(weight) - truth) <= truth * (0x1p-8 + 0x1p-13), [&] {
        return "the weight of " + std::to_string(scores[i]) + " below " + std::to_string(maximum) +
               " has a relative error of " + std::to_string(static_cast<double>(weight) / truth - 1.0);
      });
    }
  }
}
#endif

}  // namespace

void test_attention_in_bfloat(Suite& suite) {
  run_in_bfloat(suite, "double precision", test_truth);
  run_in_bfloat(suite, "bits of any chunks and of any split", test_splits);
  run_in_bfloat(suite, "a cache in tiles", test_tiled_cache);
  suite.run_rows(append_cache_f32, "a cache in tiles", test_append_to_tiles);
  run_in_bfloat(suite, "rounding of values", [](const Kernels& kernels) {
    test_rounding(kernels, CacheType::float32);
    // The appending kernel, which is not trapped, rounds the values of this cache.
    if (!kernels.are_caught) test_rounding(kernels, CacheType::bfloat16);
  });
  run_in_bfloat(suite, "rounding and places of keys", test_rounded_keys);
  run_in_bfloat(suite, "values that vanish", test_vanishing_values);
#if defined(__x86_64__) || defined(_M_X64)
  const std::string operations = "attend_f32_bf16: operations around tiles";
  if (is_supported(Isa::avx512vnni)) {
    suite.run(operations, test_operations);
  } else {
    suite.skip(operations, "avx512vnni not supported by this processor");
  }
  const std::string weights = "attend_f32_bf16_cache_avx512bf16: weights of complete blocks";
  if (is_supported(Isa::avx512bf16)) {
    suite.run(weights, test_weights_by_pairs);
  } else {
    suite.skip(weights, "avx512bf16 not supported by this processor");
  }
#endif
}

}  // namespace chunkrt::testing
