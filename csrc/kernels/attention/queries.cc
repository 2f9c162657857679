// How the queries of one call are numbered and found.
#include "kernels/attention/queries.h"

#include <algorithm>

namespace chunkrt {
namespace {

std::size_t queries_per_kv_head(const AttentionArgs& args) {
  return args.rows * (args.num_heads / args.num_kv_heads);
}

std::size_t items_per_kv_head(const AttentionArgs& args) {
  return (queries_per_kv_head(args) + kQueriesPerItem - 1) / kQueriesPerItem;
}

}  // namespace

std::size_t attention_scratch_floats(std::size_t head_dim) {
  return (kQueriesPerItem + 2 * kKeysPerBlock) * head_dim;
}

std::size_t attend_items(const AttentionArgs& args) { return args.num_kv_heads * items_per_kv_head(args); }

AttendItem attend_item(const AttentionArgs& args, std::size_t index) {
  const std::size_t first = index % items_per_kv_head(args) * kQueriesPerItem;
  return {index / items_per_kv_head(args), first,
          std::min(kQueriesPerItem, queries_per_kv_head(args) - first)};
}

Query find_query(const AttentionArgs& args, std::size_t kv_head, std::size_t query) {
  const std::size_t group = args.num_heads / args.num_kv_heads;
  const std::size_t row = query / group, head = kv_head * group + query % group;
  const std::size_t position = args.position + row, half = args.rotary_dim / 2;
  const std::size_t row_width = (args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
  return {.input = args.qkv + row * row_width + head * args.head_dim,
          .cos = args.cos + position * half,
          .sin = args.sin + position * half,
          .out = args.out + (row * args.num_heads + head) * args.head_dim,
          .num_keys = position + 1};
}

std::size_t cache_index(const AttentionArgs& args, std::size_t kv_head, std::size_t position) {
  return (kv_head * args.capacity + position) * args.head_dim;
}

}  // namespace chunkrt
