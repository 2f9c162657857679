// Stores to a cache of bfloat16, the layout of attention.h.
#include "kernels/attention/tiled_cache.h"

#include "kernels/attention/tile_operations.h"

namespace chunkrt {
namespace {

std::uint16_t* find_block(const AttentionArgs& args, void* cache, std::size_t kv_head, std::size_t position) {
  return reinterpret_cast<std::uint16_t*>(static_cast<std::byte*>(cache) +
                                          cache_offset(args, kv_head, position));
}

}  // namespace

void store_tiled(const AttentionArgs& args, std::size_t kv_head, std::size_t position, const float* key,
                 const float* value, RoundFunction* round, std::uint16_t* rounded) {
  const std::size_t depth = tiled_depth(args.head_dim), in_block = position % kKeysPerBlock;
  std::uint16_t* const keys = find_block(args, args.key_cache, kv_head, position) +
                              in_block / kRowsPerTile * kRowsPerTile * depth + in_block % kRowsPerTile * 2;
  const auto place_key = [keys](std::size_t d) -> std::uint16_t& {
    return keys[d / 2 * kDepthPerTile + d % 2];
  };
  round(key, rounded, args.head_dim);
  for (std::size_t d = 0; d < args.head_dim; ++d) place_key(d) = rounded[d];

  std::uint16_t* const values =
      find_block(args, args.value_cache, kv_head, position) + in_block / 2 * kDepthPerTile + in_block % 2;
  const auto place_value = [values](std::size_t d) -> std::uint16_t& {
    return values[d / kRowsPerTile * kRowsPerTile * kKeysPerBlock + d % kRowsPerTile * 2];
  };
  round(value, rounded, args.head_dim);
  for (std::size_t d = 0; d < args.head_dim; ++d) place_value(d) = rounded[d];

  for (std::size_t d = args.head_dim; d < depth; ++d) place_key(d) = place_value(d) = 0;
}

}  // namespace chunkrt
