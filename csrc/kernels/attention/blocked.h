// attention for processors with vectors: the loops over items, key blocks and tiles, written once, and the
// few operations that each instruction set provides for them.
#pragma once

#include "kernels/attention/int8_cache.h"
#include "kernels/attention/queries.h"
#include "kernels/elementwise/elementwise.h"

namespace chunkrt {

inline constexpr std::size_t kMaxQueriesPerTile = 6;

// A block of keys and their values, the same for all queries of an item.
struct KeyBlock {
  const float* keys;    // [head_dim, kKeysPerBlock]: transposed, so that adjacent keys fill a vector
  const float* values;  // [keys, head_dim]
  std::size_t head_dim;
};

// One or more adjacent queries that are processed with a key block together. Each query attends to the keys
// [first, visible) of the block. Rows ascend, so `visible` ascends.
struct QueryTile {
  const float* queries;        // [tile, head_dim], roped and scaled
  float* const* outs;          // [tile] pointers to [head_dim]
  float* maxima;               // [tile]: m of attention.h
  float* sums;                 // [tile]: l
  float soft_cap;              // bound of scores; 0: none
  std::size_t first;           // above 0 only where the window of a row or a dual chunk begins
  const std::size_t* visible;  // [tile]: up to kKeysPerBlock
};

using AttendTileFunction = void(const KeyBlock& block, const QueryTile& tile);

// Operations that an instruction set provides.
struct AttentionOperations {
  // Ropes one head and multiplies it by `scale`.
  void (*rope)(const float* input, const float* cos, const float* sin, std::size_t head_dim,
               std::size_t rotary_dim, float scale, float* out);
  // float32 to IEEE 754 binary16, to nearest even.
  void (*narrow)(const float* input, std::uint16_t* out, std::size_t count);
  WidenFunction* widen;
  QuantizeFunction* quantize;
  DequantizeFunction* dequantize;
  // keys [num_keys, head_dim] to [head_dim, kKeysPerBlock]; columns from num_keys on have any content.
  void (*transpose)(const float* keys, std::size_t num_keys, std::size_t head_dim, float* out);
  // Element [i] processes a tile of i + 1 queries, up to queries_per_tile.
  AttendTileFunction* const* attend_tile;
  std::size_t queries_per_tile;
};

void append_blocked(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                    const AttentionOperations& operations);
void attend_blocked(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                    const AttentionOperations& operations);

}  // namespace chunkrt
