// The blocked loops of attention; compiled without flags, since all that is hot is behind `operations`.
#include "kernels/attention/blocked.h"

#include <algorithm>
#include <limits>

namespace chunkrt {
namespace {

// `rows` neighbouring rows of a cache as float32: the cache itself, or a copy in `buffer`.
const float* widened(const AttentionArgs& args, const void* cache, std::size_t index, std::size_t rows,
                     float* buffer, const AttentionOperations& operations) {
  if (args.cache_type == CacheType::float32) return static_cast<const float*>(cache) + index;
  operations.widen(static_cast<const std::uint16_t*>(cache) + index, buffer, rows * args.head_dim);
  return buffer;
}

void store(const AttentionArgs& args, void* cache, std::size_t index, const float* values,
           const AttentionOperations& operations) {
  if (args.cache_type == CacheType::float32) {
    std::copy_n(values, args.head_dim, static_cast<float*>(cache) + index);
  } else {
    operations.narrow(values, static_cast<std::uint16_t*>(cache) + index, args.head_dim);
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
  std::size_t num_keys[kQueriesPerItem], visible[kQueriesPerItem];
  for (std::size_t i = 0; i < item.num_queries; ++i) {
    const Query query = find_query(args, item.kv_head, item.first_query + i);
    operations.rope(query.input, query.cos, query.sin, head_dim, args.rotary_dim, args.scale,
                    roped + i * head_dim);
    std::fill_n(query.out, head_dim, 0.0f);
    outs[i] = query.out;
    maxima[i] = -std::numeric_limits<float>::infinity();
    sums[i] = 0.0f;
    num_keys[i] = query.num_keys;
  }

  const std::size_t item_keys = num_keys[item.num_queries - 1];
  for (std::size_t start = 0; start < item_keys; start += kKeysPerBlock) {
    const std::size_t block_keys = std::min(kKeysPerBlock, item_keys - start);
    const std::size_t index = cache_index(args, item.kv_head, start);
    operations.transpose(widened(args, args.key_cache, index, block_keys, buffer, operations), block_keys,
                         head_dim, transposed);
    const KeyBlock block = {.keys = transposed,
                            .values = widened(args, args.value_cache, index, block_keys, buffer, operations),
                            .head_dim = head_dim};
    for (std::size_t i = 0; i < item.num_queries; ++i) {
      visible[i] = num_keys[i] > start ? std::min(kKeysPerBlock, num_keys[i] - start) : 0;
    }
    for (std::size_t i = 0; i < item.num_queries; i += operations.queries_per_tile) {
      const std::size_t tile = std::min(operations.queries_per_tile, item.num_queries - i);
      if (visible[i + tile - 1] == 0) continue;
      operations.attend_tile[tile - 1](block, {.queries = roped + i * head_dim,
                                               .outs = outs + i,
                                               .maxima = maxima + i,
                                               .sums = sums + i,
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
  const std::size_t row_width = (args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
  const std::size_t half = args.rotary_dim / 2;
  for (std::size_t row = begin; row < end; ++row) {
    const std::size_t position = args.position + row;
    for (std::size_t head = 0; head < args.num_kv_heads; ++head) {
      const float* key = args.qkv + row * row_width + (args.num_heads + head) * args.head_dim;
      const float* value = key + args.num_kv_heads * args.head_dim;
      const std::size_t index = cache_index(args, head, position);
      operations.rope(key, args.cos + position * half, args.sin + position * half, args.head_dim,
                      args.rotary_dim, 1.0f, scratch);
      store(args, args.key_cache, index, scratch, operations);
      store(args, args.value_cache, index, value, operations);
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
