// The queries of one KV head, numbered row by row: query = row * group + head within the group, where group =
// num_heads / num_kv_heads. An item of `attend` consists of kQueriesPerItem adjacent queries
// (kQueriesPerTileItem in bfloat16), which share every key block that they load.
#pragma once

#include "kernels/attention/attention.h"

namespace chunkrt {

inline constexpr std::size_t kKeysPerBlock = 64;
inline constexpr std::size_t kQueriesPerItem = 48;  // a multiple of every kernel's tile of 6 or 4 queries
// An item is large because rounding and packing a block for tiles takes the same time for any number of
// queries; see tiles.h.
inline constexpr std::size_t kQueriesPerTileItem = 192;
// With a bfloat16 cache nothing is packed, so small items, which balance the threads, cost little with
// vectors. (With AMX the items remain large, because smaller ones were not measured.) `num_queries`: of a KV
// head.
constexpr std::size_t queries_per_tiled_item(std::size_t num_queries) {
  constexpr std::size_t kMost = 96;
  return num_queries >= 3 * kMost ? kMost : kMost / 2;
}

struct AttendItem {
  std::size_t kv_head;
  std::size_t first_query;
  std::size_t num_queries;
};

// Rotary embedding of one query or key, and the factor that it is multiplied by.
struct Rotation {
  const float* cos;  // [rotary_dim / 2]
  const float* sin;  // as cos
  float scale;
};

// Operands of one query.
struct Query {
  std::size_t head;
  std::size_t position;
  const float* input;  // [head_dim], not yet roped
  float* out;          // [head_dim]
  std::size_t first_key;
  std::size_t end_key;  // the query attends to the keys first_key .. end_key - 1
};

AttendItem attend_item(const AttentionArgs& args, std::size_t index);
Query find_query(const AttentionArgs& args, std::size_t kv_head, std::size_t query);

// m and l of attention.h before the first block.
struct SoftmaxStart {
  float maximum;
  float sum;
};
SoftmaxStart softmax_start(const AttentionArgs& args, const Query& query);

// The rotation of the key of a position.
Rotation key_rotation(const AttentionArgs& args, std::size_t position);

// The rotation of the query of a position where it meets the keys from `key` to before `span_end`.
Rotation query_rotation(const AttentionArgs& args, std::size_t position, std::size_t key);

// The first key after `key` that queries meet in another rotation.
std::size_t span_end(const AttentionArgs& args, std::size_t key);

// Bias that the cache omits from a head's raw keys, [head_dim]; nullptr without one.
const float* key_bias(const AttentionArgs& args, std::size_t kv_head);

// Bytes of a row of a cache.
std::size_t row_bytes(const AttentionArgs& args);

// Byte offset of a position's row in a cache; in a bfloat16 cache, that of the position's block. Rows are
// contiguous up to the next position that is a multiple of 64.
std::size_t cache_offset(const AttentionArgs& args, std::size_t kv_head, std::size_t position);

}  // namespace chunkrt
