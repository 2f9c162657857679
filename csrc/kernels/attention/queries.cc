// The numbering of the queries of one call.
#include "kernels/attention/queries.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/tile_operations.h"

namespace chunkrt {
namespace {

std::size_t queries_per_kv_head(const AttentionArgs& args) {
  return args.rows * (args.num_heads / args.num_kv_heads);
}

std::size_t queries_per_item(const AttentionArgs& args) {
  if (args.queries_per_item > 0) return args.queries_per_item;
  return args.math != AttentionMath::float32 ? kQueriesPerTileItem : kQueriesPerItem;
}

std::size_t items_per_kv_head(const AttentionArgs& args) {
  return (queries_per_kv_head(args) + queries_per_item(args) - 1) / queries_per_item(args);
}

Rotation rotation(const AttentionArgs& args, std::size_t table_row, float scale) {
  const std::size_t index = table_row * (args.rotary_dim / 2);
  return {args.cos + index, args.sin + index, scale};
}

// The factor of the query and the key of a position.
float length_factor(const AttentionArgs& args, std::size_t position) {
  const std::size_t long_from = args.dual_chunks.long_from;
  const std::size_t length = std::max(position + 1, args.table_row - args.position);
  if (long_from == 0 || length <= long_from) return 1.0f;
  return static_cast<float>(1.0 +
                            0.1 * std::log(static_cast<double>(length) / static_cast<double>(long_from)));
}

}  // namespace

std::size_t attention_scratch_floats(std::size_t head_dim, AttentionMath math) {
  if (math != AttentionMath::float32) {
    const TileSizes sizes = tile_sizes(head_dim);
    return sizes.queries + sizes.keys + sizes.values + sizes.weights + sizes.outs + sizes.rows + sizes.scores;
  }
  return (kQueriesPerItem + 2 * kKeysPerBlock) * head_dim;
}

std::size_t attend_items(const AttentionArgs& args) { return args.num_kv_heads * items_per_kv_head(args); }

AttendItem attend_item(const AttentionArgs& args, std::size_t index) {
  const std::size_t first = index % items_per_kv_head(args) * queries_per_item(args);
  return {index / items_per_kv_head(args), first,
          std::min(queries_per_item(args), queries_per_kv_head(args) - first)};
}

Query find_query(const AttentionArgs& args, std::size_t kv_head, std::size_t query) {
  const std::size_t group = args.num_heads / args.num_kv_heads;
  const std::size_t row = query / group, head = kv_head * group + query % group;
  const std::size_t position = args.position + row, end = position + 1;
  const std::size_t num_kv_columns = args.appends ? 2 * args.num_kv_heads : 0;
  const std::size_t row_width = (args.num_heads + num_kv_columns) * args.head_dim;
  return {.head = head,
          .position = position,
          .input = args.qkv + row * row_width + head * args.head_dim,
          .out = args.out + (row * args.num_heads + head) * args.head_dim,
          .first_key = args.window > 0 && end > args.window ? end - args.window : 0,
          .end_key = end};
}

SoftmaxStart softmax_start(const AttentionArgs& args, const Query& query) {
  if (args.sinks == nullptr) return {.maximum = -std::numeric_limits<float>::infinity(), .sum = 0.0f};
  return {.maximum = args.sinks[query.head], .sum = 1.0f};
}

Rotation key_rotation(const AttentionArgs& args, std::size_t position) {
  const DualChunks& chunks = args.dual_chunks;
  if (chunks.period == 0) return rotation(args, args.table_row + position - args.position, 1.0f);
  return rotation(args, position % chunks.period, length_factor(args, position));
}

Rotation query_rotation(const AttentionArgs& args, std::size_t position, std::size_t key) {
  const DualChunks& chunks = args.dual_chunks;
  if (chunks.period == 0) return rotation(args, args.table_row + position - args.position, args.scale);
  const std::size_t in_chunk = position % chunks.period;
  const std::size_t chunk = position / chunks.period, key_chunk = key / chunks.period;
  std::size_t row = in_chunk;
  if (chunk == key_chunk + 1) row = std::min(in_chunk + chunks.period, chunks.limit);
  if (chunk > key_chunk + 1) row = std::min(2 * chunks.period - 1, chunks.limit);
  return rotation(args, row, args.scale * length_factor(args, position));
}

std::size_t span_end(const AttentionArgs& args, std::size_t key) {
  const std::size_t period = args.dual_chunks.period;
  return period == 0 ? std::numeric_limits<std::size_t>::max() : (key / period + 1) * period;
}

const float* key_bias(const AttentionArgs& args, std::size_t kv_head) {
  return args.key_bias == nullptr ? nullptr : args.key_bias + kv_head * args.head_dim;
}

std::size_t row_bytes(const AttentionArgs& args) { return cache_row_bytes(args.cache_type, args.head_dim); }

std::size_t cache_offset(const AttentionArgs& args, std::size_t kv_head, std::size_t position) {
  std::size_t slot = position % args.capacity;
  if (args.cache_type == CacheType::bfloat16) slot = slot / kKeysPerBlock * kKeysPerBlock;
  return (kv_head * args.capacity + slot) * row_bytes(args);
}

}  // namespace chunkrt
