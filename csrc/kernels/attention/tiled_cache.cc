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

void store_tiled(const AttentionArgs& args, std::size_t kv_head, std::size_t position, const float* key,
                 const float* value, RoundFunction* round, std::uint16_t* rounded) {
  const std::size_t depth = tiled_depth(args.head_dim), in_block = position % kKeysPerBlock;
  std::fill(rounded + args.head_dim, rounded + depth, std::uint16_t{0});

  std::uint16_t* const keys = tiled_block(args, args.key_cache, kv_head, position) +
                              in_block / kRowsPerTile * kRowsPerTile * depth + in_block % kRowsPerTile * 2;
  round(key, rounded, args.head_dim);
  for (std::size_t d = 0; d < depth; d += 2) {
    std::memcpy(keys + d / 2 * kDepthPerTile, rounded + d, 2 * sizeof(*rounded));
  }

  std::uint16_t* const values =
      tiled_block(args, args.value_cache, kv_head, position) + in_block / 2 * kDepthPerTile + in_block % 2;
  round(value, rounded, args.head_dim);
  for (std::size_t d = 0; d < depth; d += kRowsPerTile) {
    for (std::size_t i = 0; i < kRowsPerTile; ++i) values[d * kKeysPerBlock + i * 2] = rounded[d + i];
  }
}

}  // namespace chunkrt
