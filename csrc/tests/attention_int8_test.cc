// Compares attention with scores in int8 with double precision, on the integers that the cache contains. On
// one instruction set, neither splits nor chunks may change the result.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/attention_values.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

// A row after mixing, or its integers.
struct MixedRow {
  std::vector<double> values;  // integers are multiplied by the scale
  double scale;
};

std::size_t mixed_together(std::size_t depth) {
  std::size_t count = 1;
  while (depth % (2 * count) == 0) count *= 2;
  return count;
}

// The product with the Hadamard matrix whose element [i, j] is -1 to the number of ones that the binary forms
// of i and j share.
MixedRow mix(std::vector<double> row) {
  const std::size_t depth = tiled_depth(row.size()), together = mixed_together(depth);
  row.resize(depth);
  MixedRow mixed = {std::vector<double>(depth), 0.0};
  for (std::size_t i = 0; i < depth; ++i) {
    const std::size_t first = i / together * together;
    for (std::size_t j = 0; j < together; ++j) {
      mixed.values[i] += std::popcount((i - first) & j) % 2 == 0 ? row[first + j] : -row[first + j];
    }
    mixed.scale = std::max(mixed.scale, std::fabs(mixed.values[i]) / 127.0);
  }
  return mixed;
}

// A key as the cache contains it.
MixedRow cached_key(const std::vector<std::byte>& cache, const Shape& s, std::size_t head, std::size_t row) {
  const std::size_t depth = tiled_depth(s.head_dim), slots = (s.length + 63) / 64 * 64;
  const std::byte* const sixteen = cache.data() + (head * slots + row / 16 * 16) * 2 * depth;
  const auto quad = [&](std::size_t index) { return sixteen + (index * 16 + row % 16) * 4; };
  MixedRow key = {{}, static_cast<double>(read<float>(quad(depth / 4)))};
  for (std::size_t d = 0; d < depth; ++d) {
    key.values.push_back(static_cast<double>(read<std::int8_t>(quad(d / 4) + d % 4)) * key.scale);
  }
  return key;
}

std::vector<double> roped_head(const Prompt& prompt, std::size_t row, std::size_t position,
                               std::size_t column) {
  return roped(prompt, position, head_of(prompt, row, column));
}

void test_append(AttentionFunction* append) {
  const Kernels kernels = {append, attend_f32_s8_bf16_cache_reference, AttentionMath::int8};
  for (const Shape& shape : kTiledShapes) {
    const Prompt prompt(shape);
    const Result result = attend_prompt(prompt, kernels, {.chunk = 33, .is_backwards = true});
    for (std::size_t head = 0; head < shape.num_kv_heads; ++head) {
      for (std::size_t row = 0; row < shape.length; ++row) {
        const std::size_t column = (shape.num_heads + head) * shape.head_dim;
        const MixedRow expected = mix(roped_head(prompt, row, key_position(shape, row), column));
        const MixedRow found = cached_key(result.keys, shape, head, row);
        const std::string what = describe(shape) + ", position " + std::to_string(row);
        check(std::fabs(found.scale - expected.scale) <= 1e-5 * expected.scale, "scale of " + what);
        for (std::size_t d = 0; d < found.values.size(); ++d) {
          check(std::fabs(found.values[d] - expected.values[d]) <= (0.5 + 1e-3) * expected.scale,
                "key of " + what);
        }
        const std::vector<double> value = head_of(prompt, row, column + shape.num_kv_heads * shape.head_dim),
                                  stored = cached(result.values, shape, head, row, false);
        for (std::size_t d = 0; d < value.size(); ++d) {
          check(std::fabs(stored[d] - value[d]) <= 0x1p-8 * std::fabs(value[d]), "value of " + what);
        }
      }
    }
  }
}

// The integers of the keys are those in the cache. Those of a query are unknown, but differ from its mixed
// row by at most half a scale.
void check_output(const Prompt& prompt, const Result& result) {
  const Shape& s = prompt.shape;
  const std::size_t group = s.num_heads / s.num_kv_heads, depth = tiled_depth(s.head_dim);
  const double scale = static_cast<double>(scale_of(s)) / static_cast<double>(mixed_together(depth));
  for (std::size_t kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) {
    std::vector<std::vector<double>> keys, values;
    std::vector<double> magnitudes;
    for (std::size_t row = 0; row < s.length; ++row) {
      keys.push_back(cached_key(result.keys, s, kv_head, row).values);
      values.push_back(cached(result.values, s, kv_head, row, false));
      double& magnitude = magnitudes.emplace_back();
      for (std::size_t d = 0; d < depth; ++d) magnitude += std::fabs(keys.back()[d]) * scale;
    }
    for (std::size_t index = 0; index < s.length * group; ++index) {
      const std::size_t row = index / group, head = kv_head * group + index % group;
      const std::size_t first = s.window > 0 && row + 1 > s.window ? row + 1 - s.window : 0;
      MixedRow query;
      std::vector<double> weights(row + 1);
      double error = 0.0, most = sink_of(s, head);
      for (std::size_t key = first; key <= row; ++key) {
        if (key == first || s.chunks.period > 0) {
          query = mix(roped_head(prompt, row, query_position(s, row, key), head * s.head_dim));
        }
        for (std::size_t d = 0; d < depth; ++d) weights[key] += query.values[d] * keys[key][d] * scale;
        error =
            std::max(error, (0.5 + 1e-3) * query.scale * magnitudes[key] + 1e-5 * std::fabs(weights[key]));
        weights[key] = capped(s, weights[key]);
        most = std::max(most, weights[key]);
      }
      double sum = std::exp(sink_of(s, head) - most);
      for (std::size_t key = first; key <= row; ++key) sum += weights[key] = std::exp(weights[key] - most);
      const double relative = 2.0 * std::expm1(2.0 * error) + 0x1p-7;  // and roundings of weights to bfloat16
      for (std::size_t d = 0; d < s.head_dim; ++d) {
        double expected = 0.0, magnitude = 0.0;
        for (std::size_t key = first; key <= row; ++key) {
          const double value = values[key][d];
          expected += weights[key] / sum * value;
          magnitude += weights[key] / sum * std::fabs(value);
        }
        const double found = static_cast<double>(result.out[row * out_width(s) + head * s.head_dim + d]);
        check(std::fabs(found - expected) <= relative * magnitude + 1e-30, [&] {
          return "row " + std::to_string(row) + ", head " + std::to_string(head) + " is " +
                 std::to_string(found) + ", expected " + std::to_string(expected) + " within " +
                 std::to_string(relative * magnitude);
        });
      }
    }
  }
}

void test_truth(const Kernels& kernels) {
  for (const Shape& shape : kTiledShapes) {
    const Prompt prompt(shape, 1.0f);
    try {
      check_output(prompt, attend_prompt(prompt, kernels));
    } catch (const Failure& failure) {
      throw Failure(describe(shape) + ": " + failure.what());
    }
  }
}

// A query and a key with one element other than 0 have the exact score, for every place of the element and of
// the key.
void test_places(const Kernels& kernels) {
  constexpr std::size_t kRows = 70;
  for (const std::size_t dims : {64u, 96u, 128u}) {
    const Shape shape = {1, 1, dims, 0, kRows, CacheType::bfloat16};
    for (std::size_t d = 0; d < dims; d += 3) {
      const std::size_t chosen = (d * 37 + 1) % (kRows - 1), row = kRows - 1;
      Prompt prompt(shape);
      std::fill_n(prompt.qkv.data(), prompt.qkv.size(), 0.0f);
      prompt.qkv[row * row_width(shape) + d] = 4.0f / scale_of(shape);
      prompt.qkv[chosen * row_width(shape) + dims + d] = 1.0f;
      prompt.qkv[(chosen + 1) % (kRows - 1) * row_width(shape) + dims + (d + 1) % dims] = 1.0f;
      prompt.qkv[chosen * row_width(shape) + 2 * dims] = 1.0f;
      const double found = static_cast<double>(attend_prompt(prompt, kernels).out[row * dims]);
      const double weight = std::exp(4.0), expected = weight / (weight + static_cast<double>(kRows - 1));
      check(std::fabs(found - expected) <= expected * 0x1p-7, [&] {
        return "element " + std::to_string(d) + " of " + std::to_string(dims) + ": " + std::to_string(found) +
               " in place of " + std::to_string(expected);
      });
    }
  }
}

void test_splits(const Kernels& kernels) {
  for (const Shape& shape : kTiledShapes) {
    const Prompt prompt(shape);
    const Result expected = attend_prompt(prompt, kernels);
    const auto compare = [&](const Run& run, const std::string& what) {
      const Result found = attend_prompt(prompt, kernels, run);
      check_same(found.out.data(), expected.out.data(), expected.out.size(), describe(shape) + ", " + what);
    };
    for (const std::size_t chunk : {1u, 31u, 32u, 33u, 64u, 95u, 1000u}) {
      compare({.chunk = chunk}, "chunks of " + std::to_string(chunk));
      if (shape.window > 0) compare({.chunk = chunk, .is_ring = true}, "a ring");
    }
    compare({.items_per_call = 1, .is_backwards = true}, "item by item from the last");
    for (const std::size_t queries : {1u, 21u, 48u, 64u, 96u}) {
      compare({.queries_per_item = queries}, "items of " + std::to_string(queries) + " queries");
    }
  }
}

void test_not_finite(const Kernels& kernels) {
  constexpr std::size_t kBadRow = 70;
  for (const std::size_t window : {0u, 5u, 65u}) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const Shape shape = {3, 1, 16, 16, 200, CacheType::bfloat16, window};
      Prompt prompt(shape);
      const Result clean = attend_prompt(prompt, kernels);
      prompt.qkv[kBadRow * row_width(shape) + 3 * shape.head_dim + 2] = bad;  // an element of its key
      const Result result = attend_prompt(prompt, kernels, {.chunk = 48});
      const std::size_t begin = kBadRow * out_width(shape);
      const std::size_t end = window > 0 ? begin + window * out_width(shape) : result.out.size();
      check_same(result.out.data(), clean.out.data(), begin, "rows before");
      check_same(result.out.data() + end, clean.out.data() + end, result.out.size() - end, "rows after");
      for (std::size_t i = begin; i < end; ++i) {
        check(std::isnan(result.out[i]), "an output that depends on a key that is not finite is finite");
      }
    }
  }
}

}  // namespace

void test_attention_in_int8(Suite& suite) {
  const auto run = [&](const std::string& name, void (*test)(const Kernels&)) {
    suite.run_rows(attend_f32_s8_bf16_cache, name, [&](AttentionFunction* attend) {
      test({append_cache_f32_reference, attend, AttentionMath::int8});
    });
  };
  suite.run_rows(append_cache_f32, "keys in int8", test_append);
  run("double precision", test_truth);
  run("places of elements and keys", test_places);
  run("bits of any chunks and of any split", test_splits);
  run("keys that are not finite", test_not_finite);
}

}  // namespace chunkrt::testing
