// The blocked loops of attention; compiled without special flags, because all hot code is behind
// `operations`.
#include "kernels/attention/blocked.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "kernels/attention/tile_operations.h"
#include "kernels/attention/tiled_cache.h"

namespace chunkrt {
namespace {

// Returns `count` adjacent rows of a cache as float32, plus the bias that the cache omits. The result points
// to the cache itself or to a copy in `buffer`.
const float* widened(const AttentionArgs& args, const void* cache, std::size_t offset, std::size_t count,
                     const float* bias, float* buffer, const AttentionOperations& operations) {
  const auto* rows = static_cast<const std::byte*>(cache) + offset;
  if (args.cache_type == CacheType::float32) return reinterpret_cast<const float*>(rows);
  if (args.cache_type == CacheType::float16) {
    operations.widen(reinterpret_cast<const std::uint16_t*>(rows), buffer, count * args.head_dim);
    return buffer;
  }
  for (std::size_t row = 0; row < count; ++row) {
    operations.dequantize(rows, args.head_dim, bias, buffer + row * args.head_dim);
    rows += row_bytes(args);
  }
  return buffer;
}

// `scratch` has room for head_dim + 3 floats.
void store(const AttentionArgs& args, void* cache, std::size_t offset, const float* values, float* scratch,
           const AttentionOperations& operations) {
  auto* const row = static_cast<std::byte*>(cache) + offset;
  switch (args.cache_type) {
    case CacheType::float32:
      std::memcpy(row, values, args.head_dim * sizeof(float));
      return;
    case CacheType::float16:
      operations.narrow(values, reinterpret_cast<std::uint16_t*>(row), args.head_dim);
      return;
    case CacheType::bfloat16:
      return;  // append_tiled
    case CacheType::int8:
      store_int8(values, args.head_dim, operations.quantize, row, scratch);
  }
}

// Ropes the raw keys from `first` on, of a block that begins with the position `start`, into `roped`, which
// may be `keys`.
void rope_keys(const AttentionArgs& args, const float* keys, std::size_t start, std::size_t first,
               std::size_t end, float* roped, const AttentionOperations& operations) {
  for (std::size_t key = first; key < end; ++key) {
    const std::size_t offset = (key - start) * args.head_dim;
    const auto [cos, sin, scale] = key_rotation(args, key);
    operations.rope(keys + offset, cos, sin, args.head_dim, args.rotary_dim, scale, roped + offset);
  }
}

// Ropes the queries of an item for the span of keys that begins with `key`.
void rope_queries(const AttentionArgs& args, const AttendItem& item, std::size_t key, float* roped,
                  const AttentionOperations& operations) {
  for (std::size_t i = 0; i < item.num_queries; ++i) {
    const Query query = find_query(args, item.kv_head, item.first_query + i);
    const auto [cos, sin, scale] = query_rotation(args, query.position, key);
    operations.rope(query.input, cos, sin, args.head_dim, args.rotary_dim, scale, roped + i * args.head_dim);
  }
}

void attend(const AttentionArgs& args, const AttendItem& item, float* scratch,
            const AttentionOperations& operations) {
  const std::size_t head_dim = args.head_dim;
  float* const roped = scratch;
  float* const transposed = roped + kQueriesPerItem * head_dim;
  float* const buffer = transposed + kKeysPerBlock * head_dim;

  float* outs[kQueriesPerItem];
  float maxima[kQueriesPerItem], sums[kQueriesPerItem];
  std::size_t first_keys[kQueriesPerItem], end_keys[kQueriesPerItem];
  std::size_t first[kQueriesPerItem], visible[kQueriesPerItem];  // in a block
  for (std::size_t i = 0; i < item.num_queries; ++i) {
    const Query query = find_query(args, item.kv_head, item.first_query + i);
    std::fill_n(query.out, head_dim, 0.0f);
    outs[i] = query.out;
    const SoftmaxStart softmax = softmax_start(args, query);
    maxima[i] = softmax.maximum;
    sums[i] = softmax.sum;
    first_keys[i] = query.first_key;
    end_keys[i] = query.end_key;
  }

  const std::size_t item_first = find_query(args, item.kv_head, item.first_query).first_key;
  const std::size_t item_end = end_keys[item.num_queries - 1];
  // A span or a block of the cache ends before the key `next`.
  for (std::size_t key = item_first, next, next_span = item_first; key < item_end; key = next) {
    if (key == next_span) {
      rope_queries(args, item, key, roped, operations);
      next_span = std::min(span_end(args, key), item_end);
    }
    const std::size_t start = key / kKeysPerBlock * kKeysPerBlock;
    next = std::min(start + kKeysPerBlock, next_span);
    const std::size_t block_keys = next - start;
    const std::size_t offset = cache_offset(args, item.kv_head, start);
    const float* keys =
        widened(args, args.key_cache, offset, block_keys, key_bias(args, item.kv_head), buffer, operations);
    if (args.has_raw_keys) {
      rope_keys(args, keys, start, key, next, buffer, operations);
      keys = buffer;
    }
    operations.transpose(keys, block_keys, head_dim, transposed);
    const KeyBlock block = {
        .keys = transposed,
        .values = widened(args, args.value_cache, offset, block_keys, nullptr, buffer, operations),
        .head_dim = head_dim};
    for (std::size_t i = 0; i < item.num_queries; ++i) {
      first[i] = std::max(first_keys[i], key) - start;
      visible[i] = std::max(std::min(end_keys[i], next), start) - start;
    }
    for (std::size_t i = 0, tile = 1; i < item.num_queries; i += tile) {
      tile = 1;
      if (visible[i] <= first[i]) continue;
      const std::size_t most = std::min(operations.queries_per_tile, item.num_queries - i);
      while (tile < most && first[i + tile] == first[i]) ++tile;
      operations.attend_tile[tile - 1](block, {.queries = roped + i * head_dim,
                                               .outs = outs + i,
                                               .maxima = maxima + i,
                                               .sums = sums + i,
                                               .soft_cap = args.soft_cap,
                                               .first = first[i],
                                               .visible = visible + i});
    }
  }

  for (std::size_t i = 0; i < item.num_queries; ++i) {
    const float inverse = 1.0f / sums[i];
    for (std::size_t d = 0; d < head_dim; ++d) outs[i][d] *= inverse;
  }
}

}  // namespace

void append_blocked(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                    const AttentionOperations& operations) {
  if (args.cache_type == CacheType::bfloat16) {
    append_tiled(args, begin, end, scratch, tile_operations());
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
        const auto [cos, sin, scale] = key_rotation(args, position);
        operations.rope(key, cos, sin, args.head_dim, args.rotary_dim, scale, roped);
        key = roped;
      }
      if (const float* const bias = key_bias(args, head)) {
        std::transform(key, key + args.head_dim, bias, roped, std::minus<>());
        key = roped;
      }
      store(args, args.key_cache, offset, key, quantized, operations);
      store(args, args.value_cache, offset, value, quantized, operations);
    }
  }
}

void attend_blocked(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                    const AttentionOperations& operations) {
  for (std::size_t index = begin; index < end; ++index) {
    attend(args, attend_item(args, index), scratch, operations);
  }
}

}  // namespace chunkrt
