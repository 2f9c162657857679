// attention, portable: in float32 this is the reference implementation, which all others match bit for bit.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "kernels/attention/int8_cache.h"
#include "kernels/attention/plain_tiles.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/round_bfloat.h"
#include "kernels/attention/tile_products.h"
#include "kernels/attention/tiled_cache.h"
#include "kernels/attention/tiles.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

void rope(const float* input, const float* cos, const float* sin, std::size_t head_dim,
          std::size_t rotary_dim, float scale, float* out) {
  const std::size_t half = rotary_dim / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const float first = input[i], second = input[i + half];
    out[i] = std::fma(first, cos[i], -(second * sin[i])) * scale;
    out[i + half] = std::fma(second, cos[i], first * sin[i]) * scale;
  }
  for (std::size_t i = rotary_dim; i < head_dim; ++i) out[i] = input[i] * scale;
}

void rope(const float* input, const Rotation& rotation, const AttentionArgs& args, float* out) {
  rope(input, rotation.cos, rotation.sin, args.head_dim, args.rotary_dim, rotation.scale, out);
}

// float32 to IEEE 754 binary16, to nearest even.
std::uint16_t narrow(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {  // below 2^-14 the result is subnormal, a multiple of 2^-24, which is the
                                  // unit in the last place of 0.5f
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t to_nearest_even = 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<std::uint16_t>(sign | (magnitude - 0x38000000u + to_nearest_even) >> 13);
}

// `scratch` has room for head_dim + 3 floats.
void store(const AttentionArgs& args, void* cache, std::size_t offset, const float* values, float* scratch) {
  auto* const row = static_cast<std::byte*>(cache) + offset;
  if (args.cache_type == CacheType::float32) {
    std::memcpy(row, values, args.head_dim * sizeof(float));
  } else if (args.cache_type == CacheType::float16) {
    std::transform(values, values + args.head_dim, reinterpret_cast<std::uint16_t*>(row), narrow);
  } else {
    store_int8(values, args.head_dim, quantize_s8row_f32_reference, row, scratch);
  }
}

void dequantize(const std::byte* row, std::size_t head_dim, const float* bias, float* out) {
  for (std::size_t d = 0; d < head_dim; ++d) {
    float scale;
    std::memcpy(&scale, row + head_dim + d / kInt8Group * sizeof(scale), sizeof(scale));
    out[d] = std::fma(static_cast<float>(static_cast<std::int8_t>(row[d])), scale,
                      bias == nullptr ? 0.0f : bias[d]);
  }
}

void load(const AttentionArgs& args, const void* cache, std::size_t offset, const float* bias,
          float* values) {
  const auto* const row = static_cast<const std::byte*>(cache) + offset;
  if (args.cache_type == CacheType::float32) {
    std::memcpy(values, row, args.head_dim * sizeof(float));
  } else if (args.cache_type == CacheType::float16) {
    widen_f32_f16_reference(reinterpret_cast<const std::uint16_t*>(row), values, args.head_dim);
  } else {
    dequantize(row, args.head_dim, bias, values);
  }
}

float exp_of_nonpositive(float x) {
  if (x < -kExpLimit) return 0.0f;
  const float n = std::nearbyint(x * kLog2E);
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, x));
  float p = kExpCoefficients[4];
  for (int i = 3; i >= 0; --i) p = std::fma(p, r, kExpCoefficients[i]);
  p = std::fma(std::fma(p, r, 1.0f), r, 1.0f);
  return std::isnan(x) ? x : std::ldexp(p, static_cast<int>(n));
}

void cap_scores(float* scores, std::size_t count, float soft_cap) {
  const float inverse = 1.0f / soft_cap;
  for (std::size_t i = 0; i < count; ++i) scores[i] *= inverse;
  tanh_f32_f32_reference(scores, scores, count);
  for (std::size_t i = 0; i < count; ++i) scores[i] *= soft_cap;
}

void attend(const AttentionArgs& args, std::size_t kv_head, const Query& query, float* scratch) {
  float* const roped = scratch;
  float* const keys = roped + args.head_dim;
  float* const values = keys + kKeysPerBlock * args.head_dim;
  float* const raw_key = values + kKeysPerBlock * args.head_dim;
  const float* const bias = key_bias(args, kv_head);
  std::fill_n(query.out, args.head_dim, 0.0f);
  auto [max, sum] = softmax_start(args, query);
  // A span or a block of the cache ends before the key `next`.
  for (std::size_t key_position = query.first_key, next; key_position < query.end_key; key_position = next) {
    const std::size_t start = key_position / kKeysPerBlock * kKeysPerBlock;
    next = std::min({start + kKeysPerBlock, span_end(args, key_position), query.end_key});
    rope(query.input, query_rotation(args, query.position, key_position), args, roped);
    const std::size_t first = key_position - start, end = next - start;
    for (std::size_t j = first; j < end; ++j) {
      const std::size_t offset = cache_offset(args, kv_head, start + j);
      float* const key = keys + j * args.head_dim;
      load(args, args.key_cache, offset, bias, args.has_raw_keys ? raw_key : key);
      if (args.has_raw_keys) rope(raw_key, key_rotation(args, start + j), args, key);
      load(args, args.value_cache, offset, nullptr, values + j * args.head_dim);
    }

    float weights[kKeysPerBlock] = {};
    const float old_max = max;
    for (std::size_t j = first; j < end; ++j) {
      for (std::size_t d = 0; d < args.head_dim; ++d) {
        weights[j] = std::fma(roped[d], keys[j * args.head_dim + d], weights[j]);
      }
    }
    if (args.soft_cap > 0.0f) cap_scores(weights + first, end - first, args.soft_cap);
    for (std::size_t j = first; j < end; ++j) max = std::max(max, weights[j]);
    float partial_sums[16] = {};
    for (std::size_t j = first; j < end; ++j) {
      weights[j] = exp_of_nonpositive(weights[j] - max);
      partial_sums[j % 16] += weights[j];
    }
    for (std::size_t width = 8; width > 0; width /= 2) {
      for (std::size_t i = 0; i < width; ++i) partial_sums[i] += partial_sums[i + width];
    }
    const float rescale = exp_of_nonpositive(old_max - max);
    sum = std::fma(sum, rescale, partial_sums[0]);
    for (std::size_t d = 0; d < args.head_dim; ++d) {
      query.out[d] *= rescale;
      for (std::size_t j = first; j < end; ++j) {
        query.out[d] = std::fma(weights[j], values[j * args.head_dim + d], query.out[d]);
      }
    }
  }
  for (std::size_t d = 0; d < args.head_dim; ++d) query.out[d] *= 1.0f / sum;
}

float from_bfloat(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

void pack_keys(const float* keys, std::size_t depth, std::uint16_t* out) {
  for (std::size_t key = 0; key < kRowsPerTile; ++key) {
    for (std::size_t d = 0; d < depth; ++d) {
      out[d / 2 * kDepthPerTile + key * 2 + d % 2] = to_bfloat(keys[key * depth + d]);
    }
  }
}

bool pack_values(const float* values, std::size_t stride, std::size_t columns, std::uint16_t* out) {
  bool are_finite = true;
  for (std::size_t key = 0; key < kRowsPerTile; ++key) {
    for (std::size_t d = 0; d < columns; ++d) {
      const std::uint16_t value = to_bfloat(values[key * stride + d]);
      out[d / 16 * 16 * kKeysPerBlock + key / 2 * kDepthPerTile + d % 16 * 2 + key % 2] = value;
      are_finite &= (value & 0x7f80u) != 0x7f80u;
    }
  }
  return are_finite;
}

void weigh_rows(const ScoredRows& rows) {
  for (std::size_t row = 0; row < rows.num_rows; ++row) {
    float* const scores = rows.scores + row * kKeysPerBlock;
    std::uint16_t* const weights = rows.weights + row * kKeysPerBlock;
    std::fill_n(weights, kKeysPerBlock, std::uint16_t{0});
    if (rows.first[row] >= rows.visible[row]) continue;
    if (rows.soft_cap > 0.0f) {
      cap_scores(scores + rows.first[row], rows.visible[row] - rows.first[row], rows.soft_cap);
    }
    float max = rows.maxima[row], sum = 0.0f;
    for (std::size_t j = rows.first[row]; j < rows.visible[row]; ++j) max = std::max(max, scores[j]);
    const float rescale = exp_of_nonpositive(rows.maxima[row] - max);
    for (std::size_t j = rows.first[row]; j < rows.visible[row]; ++j) {
      weights[j] = to_bfloat(exp_of_nonpositive(scores[j] - max));
      sum += from_bfloat(weights[j]);
    }
    rows.maxima[row] = max;
    rows.sums[row] = std::fma(rows.sums[row], rescale, sum);
    for (std::size_t d = 0; d < rows.columns; ++d) rows.outs[row * rows.columns + d] *= rescale;
  }
}

void pack_bytes(float* row, std::size_t depth, std::uint16_t* out) {
  for (std::size_t distance = 1; depth % (2 * distance) == 0; distance *= 2) {
    for (std::size_t i = 0; i < depth; ++i) {
      if ((i & distance) != 0) continue;
      const float x = row[i], y = row[i + distance];
      row[i] = x + y;
      row[i + distance] = x - y;
    }
  }
  const ByteRow bytes(out, depth);
  quantize_s8row_f32_reference({.input = row,
                                .values = bytes.values,
                                .scales = bytes.scale,
                                .sums = bytes.sum,
                                .width = depth,
                                .padded_width = depth},
                               0, 1);
}

// Scores in int8, one after another.
class PlainByteScores : public TileProducts<PlainTiles> {
 public:
  static constexpr bool kHasByteScores = true;

  void score(const std::uint16_t* queries, std::size_t num_rows, const std::uint16_t* keys, std::size_t depth,
             std::size_t end_key, float* scores) {
    for (std::size_t row = 0; row < num_rows; ++row) {
      const auto* const query = reinterpret_cast<const std::int8_t*>(queries + row * depth);
      float query_scale;
      std::memcpy(&query_scale, query + depth, sizeof(query_scale));
      for (std::size_t key = 0; key < end_key; ++key) {
        const std::uint16_t* of_key =
            keys + key / kRowsPerTile * kRowsPerTile * depth + key % kRowsPerTile * 2;
        std::int32_t sum = 0;
        for (std::size_t d = 0; d < depth; d += 4, of_key += kDepthPerTile) {
          const auto* const quad = reinterpret_cast<const std::int8_t*>(of_key);
          for (std::size_t i = 0; i < 4; ++i) sum += query[d + i] * quad[i];
        }
        float key_scale;
        std::memcpy(&key_scale, of_key, sizeof(key_scale));
        scores[row * kKeysPerBlock + key] = static_cast<float>(sum) * key_scale * query_scale;
      }
    }
  }
};

constexpr TileOperations kTileOperations = {.rope = rope,
                                            .widen = widen_f32_f16_reference,
                                            .dequantize = dequantize,
                                            .round = round_plainly,
                                            .pack_bytes = pack_bytes,
                                            .pack_keys = pack_keys,
                                            .pack_values = pack_values,
                                            .weigh = weigh_rows};

}  // namespace

void append_cache_f32_reference(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                float* scratch) {
  if (args.cache_type == CacheType::bfloat16) {
    append_tiled(args, begin, end, scratch, kTileOperations);
    return;
  }
  const std::size_t row_width = (args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
  float* const roped = scratch;
  float* const quantized = scratch + args.head_dim;
  for (std::size_t row = begin; row < end; ++row) {
    const std::size_t position = args.position + row;
    for (std::size_t head = 0; head < args.num_kv_heads; ++head) {
      const float* key = args.qkv + row * row_width + (args.num_heads + head) * args.head_dim;
      const float* const value = key + args.num_kv_heads * args.head_dim;
      const std::size_t offset = cache_offset(args, head, position);
      if (!args.has_raw_keys) {
        rope(key, key_rotation(args, position), args, roped);
        key = roped;
      }
      if (const float* const bias = key_bias(args, head)) {
        std::transform(key, key + args.head_dim, bias, roped, std::minus<>());
        key = roped;
      }
      store(args, args.key_cache, offset, key, quantized);
      store(args, args.value_cache, offset, value, quantized);
    }
  }
}

void attend_f32_f32_cache_reference(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                    float* scratch) {
  for (std::size_t index = begin; index < end; ++index) {
    const AttendItem item = attend_item(args, index);
    for (std::size_t i = 0; i < item.num_queries; ++i) {
      attend(args, item.kv_head, find_query(args, item.kv_head, item.first_query + i), scratch);
    }
  }
}

void attend_f32_bf16_cache_reference(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                     float* scratch) {
  attend_in_bfloat<TileProducts<PlainTiles>>(args, begin, end, scratch, kTileOperations);
}

void attend_f32_s8_bf16_cache_reference(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                        float* scratch) {
  attend_in_bfloat<PlainByteScores>(args, begin, end, scratch, kTileOperations);
}

}  // namespace chunkrt
