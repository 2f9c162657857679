// Stores to a bfloat16 cache, whose blocks are in tile layout (attention.h).
#pragma once

#include "kernels/attention/queries.h"

namespace chunkrt {

struct TileOperations;

// float32 to bfloat16, to nearest even.
using RoundFunction = void(const float* values, std::uint16_t* out, std::size_t count);

// The block of a position in a cache.
std::uint16_t* tiled_block(const AttentionArgs& args, void* cache, std::size_t kv_head, std::size_t position);

// Ropes the keys of rows [begin, end), and stores keys and values at their positions. Threads may store other
// positions at the same time, although adjacent positions share cache lines. Sixteen positions are packed
// together if they begin at a multiple of 16, so pieces of work should begin there. Scratch has
// attention_scratch_floats of bfloat16.
void append_tiled(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                  const TileOperations& operations);

}  // namespace chunkrt
