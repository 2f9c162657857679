// Compares attention with a double-precision softmax. Splits, chunks, ring buffers and the instruction set
// must not change the result.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/attention_bfloat.h"
#include "tests/attention_values.h"
#include "tests/half.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

void check_same_result(const Result& found, const Result& expected, const std::string& what) {
  check(found.keys == expected.keys, [&] { return what + ": the key caches differ"; });
  check(found.values == expected.values, [&] { return what + ": the value caches differ"; });
  check_same(found.out.data(), expected.out.data(), expected.out.size(), what + ": the output");
}

void check_cached(const std::vector<double>& found, const std::vector<double>& expected,
                  const std::vector<double>& bias, CacheType type, double error, const std::string& what) {
  for (std::size_t d = 0; d < found.size(); ++d) {
    double largest = 0.0;
    for (std::size_t i = d / 32 * 32; i < std::min(d / 32 * 32 + 32, found.size()); ++i) {
      largest = std::max(largest, std::fabs(expected[i] - bias[i]));
    }
    // The rounding error of float16 is relative to the element; that of int8 is half a step of its group,
    // which is the largest magnitude / 254. Scale, quotient and product round in float32, and so does a key
    // without its bias.
    const double storage_error = type == CacheType::float16 ? std::fabs(expected[d]) * 0x1p-11 + 0x1p-25
                                 : type == CacheType::int8  ? largest * (1.0 / 254.0 + 0x1p-20)
                                                            : 0.0;
    check(std::fabs(found[d] - expected[d]) <= storage_error + error,
          [&] { return what + " in the cache is wrong"; });
  }
}

// The caches contain the keys (roped unless they are raw) and the values, rounded to the cache type.
void check_caches(const Prompt& prompt, const Result& result) {
  const Shape& s = prompt.shape;
  for (std::size_t head = 0; head < s.num_kv_heads; ++head) {
    for (std::size_t row = 0; row < s.length; ++row) {
      const std::size_t key_column = (s.num_heads + head) * s.head_dim;
      const std::vector<double> key = head_of(prompt, row, key_column);
      // Both products of a roped key are at most 2, and each product is rounded at most once in float32.
      check_cached(cached(result.keys, s, head, row, true),
                   s.has_raw_keys ? key : roped(prompt, key_position(s, row), key), left_out(s, head, true),
                   s.cache_type, s.has_raw_keys ? 0.0 : 4.0 * 0x1p-23, "a key");
      check_cached(cached(result.values, s, head, row, false),
                   head_of(prompt, row, key_column + s.num_kv_heads * s.head_dim), left_out(s, head, false),
                   s.cache_type, 0.0, "a value");
    }
  }
}

void check_output(const Prompt& prompt, const Result& result) {
  const Shape& s = prompt.shape;
  constexpr double kUnit = 0x1p-24;
  static const double kVanishing = std::exp(-87.0);
  const double dims = static_cast<double>(s.head_dim);
  for (std::size_t kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) {
    std::vector<std::vector<double>> keys, values;
    for (std::size_t row = 0; row < s.length; ++row) {
      const std::vector<double> key = cached(result.keys, s, kv_head, row, true);
      keys.push_back(s.has_raw_keys ? roped(prompt, key_position(s, row), key) : key);
      values.push_back(cached(result.values, s, kv_head, row, false));
    }
    const std::size_t group = s.num_heads / s.num_kv_heads;
    for (std::size_t index = 0; index < s.length * group; ++index) {
      const std::size_t row = index / group, head = kv_head * group + index % group;
      const std::size_t first_key = s.window > 0 && row + 1 > s.window ? row + 1 - s.window : 0;
      const double num_keys = static_cast<double>(row + 1 - first_key);
      const std::vector<double> raw_query = head_of(prompt, row, head * s.head_dim);
      std::vector<double> query;
      const double scale = static_cast<double>(scale_of(s));
      std::vector<double> weights(row + 1);
      double largest_sum = 0.0, max = sink_of(s, head);
      for (std::size_t key = first_key; key <= row; ++key) {
        double sum_of_magnitudes = 0.0;
        const std::vector<double>& k = keys[key];
        if (key == first_key || s.chunks.period > 0) {
          query = roped(prompt, query_position(s, row, key), raw_query);
        }
        for (std::size_t d = 0; d < s.head_dim; ++d) {
          const double product = query[d] * k[d] * scale;
          weights[key] += product;
          // The error of a roped value is relative to its two terms, each of which is at most 2, or
          // correspondingly more for a key with a bias; for int8 it is slightly larger.
          const double larger = 1.0 + static_cast<double>(s.bias) / 2.0;
          const double terms = std::fabs(k[d]) + (s.has_raw_keys ? std::fabs(query[d]) * larger : 0.0);
          sum_of_magnitudes += std::fabs(product) + 4.1 * terms * scale;
        }
        largest_sum = std::max(largest_sum, sum_of_magnitudes);
        weights[key] = capped(s, weights[key]);
        max = std::max(max, weights[key]);
      }
      double sum = std::exp(sink_of(s, head) - max);
      for (std::size_t key = first_key; key <= row; ++key) {
        sum += weights[key] = std::exp(weights[key] - max);
      }
      // This is the maximum error of scores. The relative error of weights is twice as large (that of the
      // score and that of the maximum), plus the roundings of exp, of the rescaling of each block and of the
      // sums.
      const double score_error = ((dims + 4.0) * kUnit + (s.soft_cap > 0.0f ? 0x1p-20 : 0.0)) * largest_sum;
      const double relative_error = 2.0 * std::expm1(2.0 * score_error) + (2.0 * num_keys + 32.0) * kUnit;
      std::vector<double> expected_row(s.head_dim), bounds(s.head_dim);
      for (std::size_t key = first_key; key <= row; ++key) {
        const std::vector<double>& value = values[key];
        // A weight that is below e^-87 of the largest, or of a sink, counts as 0.
        const double weight = weights[key] / sum, bound = relative_error * weight + kVanishing;
        for (std::size_t d = 0; d < s.head_dim; ++d) {
          expected_row[d] += weight * value[d];
          bounds[d] += bound * std::fabs(value[d]);
        }
      }
      for (std::size_t d = 0; d < s.head_dim; ++d) {
        const double expected = expected_row[d], bound = bounds[d];
        const double found = static_cast<double>(result.out[row * out_width(s) + head * s.head_dim + d]);
        if (std::fabs(found - expected) <= bound) continue;
        throw Failure("row " + std::to_string(row) + ", head " + std::to_string(head) + ", dim " +
                      std::to_string(d) + " is " + std::to_string(found) + ", expected " +
                      std::to_string(expected) + " within " + std::to_string(bound));
      }
    }
  }
}

void test_truth(const Kernels& kernels) {
  for (const Shape& shape : kShapes) {
    const Prompt prompt(shape);
    const Result result = attend_prompt(prompt, kernels);
    try {
      check_caches(prompt, result);
      check_output(prompt, result);
    } catch (const Failure& failure) {
      throw Failure(describe(shape) + ": " + failure.what());
    }
  }
}

void test_bits(const Kernels& kernels) {
  const Kernels reference = {append_cache_f32_reference, attend_f32_f32_cache_reference};
  for (const Shape& shape : kShapes) {
    const Prompt prompt(shape);
    const Result expected = attend_prompt(prompt, reference);
    check_same_result(attend_prompt(prompt, kernels), expected, describe(shape) + ", whole");
    for (const std::size_t chunk : {1u, 31u, 32u, 33u, 64u, 95u}) {
      check_same_result(attend_prompt(prompt, kernels, {.chunk = chunk}), expected,
                        describe(shape) + ", chunks of " + std::to_string(chunk));
    }
    check_same_result(attend_prompt(prompt, kernels, {.items_per_call = 1}), expected,
                      describe(shape) + ", item by item");
    check_same_result(attend_prompt(prompt, kernels, {.items_per_call = 1, .is_backwards = true}), expected,
                      describe(shape) + ", item by item from the last");
  }
}

// A ring buffer gives the same results as a full cache for every chunk size, after many wraps.
void test_rings(const Kernels& kernels) {
  for (const Shape& shape : kShapes) {
    if (shape.window == 0) continue;
    const Prompt prompt(shape);
    const Result expected = attend_prompt(prompt, kernels);
    for (const std::size_t chunk : {1u, 31u, 32u, 64u, 65u, 95u}) {
      if (!has_time_for(kernels, shape, chunk)) continue;
      const Result found = attend_prompt(prompt, kernels, {.chunk = chunk, .is_ring = true});
      check_same(found.out.data(), expected.out.data(), expected.out.size(),
                 describe(shape) + ", a ring, chunks of " + std::to_string(chunk));
    }
  }
}

// Far from position 0, the rows of a ring buffer give the same results as near it, once their windows are
// full; reading all earlier positions would never end.
void test_far_positions(const Kernels& kernels) {
  const Shape shape = {4, 2, 16, 16, 150, CacheType::float16, 40};
  const Prompt prompt(shape);
  const Result near = attend_prompt(prompt, kernels, {.chunk = 32, .is_ring = true});
  const std::size_t far_position = ring_slots(shape, 32) << 40;
  const Result far =
      attend_prompt(prompt, kernels, {.chunk = 32, .is_ring = true, .first_position = far_position});
  const std::size_t begin = (shape.window - 1) * out_width(shape);
  check_same(far.out.data() + begin, near.out.data() + begin, near.out.size() - begin, "rows far away");
}

void test_raw_keys(const Kernels& kernels) {
  for (Shape shape : kShapes) {
    if (shape.cache_type != CacheType::float32) continue;
    shape.has_raw_keys = false;
    const Result expected = attend_prompt(Prompt(shape), kernels);
    shape.has_raw_keys = true;
    for (const std::size_t chunk : {1u, 33u, 1000u}) {
      if (!has_time_for(kernels, shape, chunk)) continue;
      const Result found = attend_prompt(Prompt(shape), kernels, {.chunk = chunk});
      check_same(found.out.data(), expected.out.data(), expected.out.size(), describe(shape));
    }
  }
}

// The scores are so far apart that all weights except one vanish; the output is the value of the remaining
// key.
void test_extreme_scores(const Kernels& kernels) {
  const Shape shape = {1, 1, 8, 0, 200, CacheType::float32};
  Prompt prompt(shape);
  const std::size_t width = row_width(shape);
  for (std::size_t row = 0; row < shape.length; ++row) {
    for (std::size_t d = 0; d < shape.head_dim; ++d) {
      prompt.qkv[row * width + d] = d == 0 ? 1e10f : 0.0f;
      prompt.qkv[row * width + shape.head_dim + d] = d == 0 ? static_cast<float>(row % 150) : 0.0f;
    }
  }
  const Result result = attend_prompt(prompt, kernels);
  for (std::size_t row = 0; row < shape.length; ++row) {
    const std::size_t largest = row < 150 ? row : 149;
    check_same(result.out.data() + row * shape.head_dim,
               prompt.qkv.data() + largest * width + 2 * shape.head_dim, shape.head_dim,
               "row " + std::to_string(row));
  }
}

// Row t gives key 0 the score -x and its other t keys the score 0; only key 0 has a value, 1. So the output
// is e(-x) / (t + e(-x)), and shows the weight itself.
void test_small_weights(const Kernels& kernels) {
  const Shape shape = {1, 1, 1, 0, 70, CacheType::float32};
  constexpr std::size_t kNumPrompts = 100;
  // e(-x) and the sum each have an error of 1.1 units in the last place, a relative error of at most 2.2 *
  // 2^-24; four additions, the inverse and the product round.
  constexpr double kRelativeError = (2.0 * 2.2 + 6.0) * 0x1p-24;
  for (std::size_t index = 0; index < kNumPrompts; ++index) {
    Prompt prompt(shape);
    std::vector<float> x(shape.length);
    for (std::size_t row = 0; row < shape.length; ++row) {
      x[row] = 90.0f * static_cast<float>(row * kNumPrompts + index) /
               static_cast<float>(shape.length * kNumPrompts);
      prompt.qkv[row * 3] = x[row];
      prompt.qkv[row * 3 + 1] = row == 0 ? -1.0f : 0.0f;
      prompt.qkv[row * 3 + 2] = row == 0 ? 1.0f : 0.0f;
    }
    const Result result = attend_prompt(prompt, kernels);
    for (std::size_t row = 1; row < shape.length; ++row) {
      const double weight = x[row] > kExpLimit ? 0.0 : std::exp(-static_cast<double>(x[row]));
      const double expected = weight / (static_cast<double>(row) + weight);
      const double found = static_cast<double>(result.out[row]);
      // Below 2^-126 floats are multiples of 2^-149.
      check(std::fabs(found - expected) <= expected * kRelativeError + 0x1p-149, [&] {
        return "e(-" + std::to_string(x[row]) + ") among " + std::to_string(row) + " ones is off by " +
               std::to_string(std::fabs(found / expected - 1.0) * 0x1p24) + " * 2^-24";
      });
    }
  }
}

// A row that is not finite affects itself and later rows that attend to it. It affects no earlier row and no
// row whose window begins after it, regardless of the other rows in a tile.
void test_not_finite(const Kernels& kernels) {
  constexpr std::size_t kBadRow = 70;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  for (const std::size_t window : {0u, 1u, 5u, 40u, 64u, 65u}) {
    for (const CacheType type :
         {CacheType::float32, CacheType::float16, CacheType::int8, CacheType::bfloat16}) {
      if (type == CacheType::bfloat16 && kernels.math != AttentionMath::bfloat16) continue;
      for (const float bad : {kNan, kInfinity, -kInfinity}) {
        const Shape shape = {3, 1, 16, 16, 200, type, window};
        Prompt prompt(shape);
        const Result clean = attend_prompt(prompt, kernels);
        std::fill_n(prompt.qkv.data() + kBadRow * row_width(shape), row_width(shape), bad);
        const Result result = attend_prompt(prompt, kernels, {.chunk = 48, .is_ring = window > 0});
        const std::size_t begin = kBadRow * out_width(shape);
        const std::size_t end = window > 0 ? begin + window * out_width(shape) : result.out.size();
        check_same(result.out.data(), clean.out.data(), begin, "rows before");
        check_same(result.out.data() + end, clean.out.data() + end, result.out.size() - end,
                   "rows that a window of " + std::to_string(window) + " has kept from it");
        for (std::size_t i = begin; i < end; ++i) {
          check(std::isnan(result.out[i]), "an output that depends on a row that is not finite is finite");
        }
      }
    }
  }
}

// Sends every float16, the midpoints between adjacent ones, and the floats next to these midpoints through a
// float16 cache.
void test_rounding_to_half(const Kernels& kernels) {
  std::vector<float> inputs;
  for (std::uint32_t half = 0; half < 0x10000; ++half) {
    const float value = static_cast<float>(half_value(static_cast<std::uint16_t>(half)));
    if (!std::isfinite(value)) continue;
    const double next = half_value(static_cast<std::uint16_t>(half + 1));
    const float middle = std::isfinite(next) ? static_cast<float>((static_cast<double>(value) + next) / 2.0)
                                             : std::copysign(65520.0f, value);
    inputs.insert(inputs.end(), {value, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f),
                                 std::nextafter(middle, -1e9f)});
  }
  inputs.insert(inputs.end(), {1e30f, -1e30f, std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(), 0x1p-149f, -0x1p-149f});
  const std::size_t head_dim = inputs.size();
  const Shape shape = {1, 1, head_dim, 0, 1, CacheType::float16};
  Prompt prompt(shape);
  std::copy(inputs.begin(), inputs.end(), prompt.qkv.data() + 2 * head_dim);
  std::copy(inputs.begin(), inputs.end(), prompt.qkv.data() + head_dim);
  const Result result = attend_prompt(prompt, kernels);
  for (const std::vector<std::byte>& cache : {result.keys, result.values}) {
    const std::vector<double> halves = cached(cache, shape, 0, 0, true);
    for (std::size_t i = 0; i < head_dim; ++i) {
      const double found = halves[i], expected = rounded_to_half(inputs[i]);
      check(found == expected && std::signbit(found) == std::signbit(expected), [&] {
        return std::to_string(inputs[i]) + " became " + std::to_string(found) + ", expected " +
               std::to_string(expected);
      });
    }
  }
}

}  // namespace

void test_attention(Suite& suite) {
  const auto with_append = [](AttentionFunction* attend) {
    for (std::size_t i = 0; i < attend_f32_f32_cache.rows.size(); ++i) {
      if (attend_f32_f32_cache.rows[i].function == attend) return append_cache_f32.rows[i].function;
    }
    throw Failure("an attend kernel is missing in the list");
  };
  const auto run = [&](const char* name, void (*test)(const Kernels&)) {
    suite.run_rows(attend_f32_f32_cache, name,
                   [&](AttentionFunction* attend) { test({with_append(attend), attend}); });
  };
  run("a double-precision softmax", test_truth);
  run("bits of the reference, of any chunks and of any split", test_bits);
  const auto run_both = [&](const char* name, void (*test)(const Kernels&)) {
    run(name, test);
    run_in_bfloat(suite, name, test);
  };
  run_both("rings", test_rings);
  run_both("positions far from the first", test_far_positions);
  run_both("raw keys", test_raw_keys);
  run("scores far apart", test_extreme_scores);
  run("small weights", test_small_weights);
  run_both("rows that are not finite", test_not_finite);
  run("rounding to float16", test_rounding_to_half);
}

}  // namespace chunkrt::testing
