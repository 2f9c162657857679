// Stores to a bfloat16 cache, in the layout of attention.h.
#include "kernels/attention/tiled_cache.h"

#include <algorithm>
#include <cstring>

#include "kernels/attention/tile_operations.h"

namespace chunkrt {

std::uint16_t* tiled_block(const AttentionArgs& args, void* cache, std::size_t kv_head,
                           std::size_t position) {
  return reinterpret_cast<std::uint16_t*>(static_cast<std::byte*>(cache) +
                                          cache_offset(args, kv_head, position));
}

namespace {

// `keys`: the place of the key's first four integers. `key` is overwritten.
void store_bytes(float* key, std::size_t depth, const TileOperations& operations, std::uint16_t* keys,
                 std::uint16_t* row) {
  operations.pack_bytes(key, depth, row);
  const ByteRow bytes(row, depth);
  for (std::size_t d = 0; d < depth; d += 4, keys += kDepthPerTile) std::memcpy(keys, bytes.values + d, 4);
  std::memcpy(keys, bytes.scale, sizeof(*bytes.scale));
  // The other places may hold data of another session, which files must not contain.
  for (std::size_t d = depth + 4; d < 2 * depth; d += 4) std::memset(keys += kDepthPerTile, 0, 4);
}

// Stores a roped key and a value of one head at their position. Both have tiled_depth(head_dim) elements, of
// which those from head_dim on are zeros; with AttentionMath::int8 the key is overwritten. `row` has room for
// as many bfloat16.
void store_tiled(const AttentionArgs& args, std::size_t kv_head, std::size_t position, float* key,
                 const float* value, const TileOperations& operations, std::uint16_t* row) {
  const std::size_t depth = tiled_depth(args.head_dim), in_block = position % kKeysPerBlock;
  std::uint16_t* const keys = tiled_block(args, args.key_cache, kv_head, position) +
                              in_block / kRowsPerTile * kRowsPerTile * depth + in_block % kRowsPerTile * 2;
  if (args.math == AttentionMath::int8) {
    store_bytes(key, depth, operations, keys, row);
  } else {
    operations.round(key, row, depth);
    for (std::size_t d = 0; d < depth; d += 2) {
      std::memcpy(keys + d / 2 * kDepthPerTile, row + d, 2 * sizeof(*row));
    }
  }

  std::uint16_t* const values =
      tiled_block(args, args.value_cache, kv_head, position) + in_block / 2 * kDepthPerTile + in_block % 2;
  operations.round(value, row, depth);
  for (std::size_t d = 0; d < depth; d += kRowsPerTile) {
    for (std::size_t i = 0; i < kRowsPerTile; ++i) values[d * kKeysPerBlock + i * 2] = row[d + i];
  }
}

}  // namespace

void append_tiled(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                  const TileOperations& operations) {
  const std::size_t head_dim = args.head_dim, depth = tiled_depth(head_dim);
  const std::size_t row_width = (args.num_heads + 2 * args.num_kv_heads) * head_dim;
  static_assert(kQueriesPerTileItem >= 2 * (2 * kRowsPerTile + 1), "the room for queries has room for rows");
  float* const keys = scratch;  // [16, depth]
  float* const values = keys + kRowsPerTile * depth;
  auto* const row_of_cache = reinterpret_cast<std::uint16_t*>(values + kRowsPerTile * depth);
  std::fill_n(scratch, 2 * kRowsPerTile * depth, 0.0f);
  for (std::size_t row = begin, count; row < end; row += count) {
    const std::size_t position = args.position + row, in_block = position % kKeysPerBlock;
    count = position % kRowsPerTile == 0 && end - row >= kRowsPerTile ? kRowsPerTile : 1;
    for (std::size_t head = 0; head < args.num_kv_heads; ++head) {
      for (std::size_t i = 0; i < count; ++i) {
        const float* const key = args.qkv + (row + i) * row_width + (args.num_heads + head) * head_dim;
        const float* const value = key + args.num_kv_heads * head_dim;
        const auto [cos, sin, scale] = key_rotation(args, position + i);
        operations.rope(key, cos, sin, head_dim, args.rotary_dim, scale, keys + i * depth);
        std::copy_n(value, head_dim, values + i * depth);
      }
      if (count == 1 || args.math == AttentionMath::int8) {
        for (std::size_t i = 0; i < count; ++i) {
          float* const key = keys + i * depth;
          store_tiled(args, head, position + i, key, values + i * depth, operations, row_of_cache);
          std::fill(key + head_dim, key + depth, 0.0f);
        }
        continue;
      }
      std::uint16_t* const key_block = tiled_block(args, args.key_cache, head, position);
      std::uint16_t* const value_block = tiled_block(args, args.value_cache, head, position);
      operations.pack_keys(keys, depth, key_block + in_block * depth);
      operations.pack_values(values, depth, depth, value_block + in_block * kRowsPerTile);
    }
  }
}

}  // namespace chunkrt
