// The queries of one KV head, numbered row by row: query = row * group + head of the group, group being
// num_heads / num_kv_heads. An item of `attend` is kQueriesPerItem adjacent queries, in bfloat16
// kQueriesPerTileItem, which share every key block that they load.
#pragma once

#include "kernels/attention/attention.h"

namespace chunkrt {

inline constexpr std::size_t kKeysPerBlock = 64;
inline constexpr std::size_t kQueriesPerItem = 48;  // a multiple of every kernel's tile of 6 or 4 queries
// Rounding and packing a block for tiles takes the same time for one query and for all; see tiles.h.
inline constexpr std::size_t kQueriesPerTileItem = 192;

struct AttendItem {
  std::size_t kv_head;
  std::size_t first_query;
  std::size_t num_queries;
};

// Operands of one query.
struct Query {
  const float* input;  // [head_dim], not yet roped
  const float* cos;    // [rotary_dim / 2]
  const float* sin;    // as cos
  float* out;          // [head_dim]
  std::size_t first_key;
  std::size_t end_key;  // it sees the keys first_key .. end_key - 1
};

AttendItem attend_item(const AttentionArgs& args, std::size_t index);
Query find_query(const AttentionArgs& args, std::size_t kv_head, std::size_t query);

// The tables' row for a position, as an index of cos and sin.
std::size_t table_index(const AttentionArgs& args, std::size_t position);

// Bias that the cache omits from a head's raw keys, [head_dim]; nullptr without one.
const float* key_bias(const AttentionArgs& args, std::size_t kv_head);

// Bytes of a row of a cache.
std::size_t row_bytes(const AttentionArgs& args);

// Byte offset in a cache of the row of a position, of bfloat16 that of its block. Up to the next position
// that is a multiple of 64, rows are contiguous.
std::size_t cache_offset(const AttentionArgs& args, std::size_t kv_head, std::size_t position);

}  // namespace chunkrt
