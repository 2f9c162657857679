// The products of attention in bfloat16 with matrix tiles, for kernels/attention/tiles.h.
//
// A tile is 16 rows of 64 bytes. A left tile holds 32 bfloat16 dimensions of 16 queries, or the weights of 32
// keys for 16 queries. A right tile holds 16 pairs of the other factor, [16 pairs, 16 columns, 2]: pairs of
// dimensions of 16 keys, or pairs of keys of 16 dimensions of values. The product of a left and a right tile,
// 16 x 16 sums in float32, is added to a third tile.
//
// `Tiles` provides configure(rows), which sets the number of rows of sum tiles and left tiles, and the
// operations zero, load_sums, load, multiply and store on tiles that are named by their numbers. `Tiles` is
// AmxBfloatTiles (kernels/tiles_amx.h), or PlainTiles in the reference kernel.
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <atomic>

#include "kernels/attention/tile_operations.h"
#include "kernels/tile_pairs.h"

namespace chunkrt {
namespace {

// All queries use tiles, even if they are few; rows from num_rows on are computed and not used.
template <typename Tiles>
class TileProducts {
 public:
  static constexpr std::size_t kRowsAtOnce = 2 * kRowsPerTile;
  static constexpr bool kHasByteScores = false;

  TileProducts() { tiles_.configure(kRowsPerTile); }

  void score(const std::uint16_t* queries, std::size_t num_rows, const std::uint16_t* keys, std::size_t depth,
             std::size_t, float* scores) {
    if (num_rows > kRowsPerTile) {
      score_tiles<2>(queries, keys, depth, scores);
    } else {
      score_tiles<1>(queries, keys, depth, scores);
    }
  }

  // If the strides are 0, the 16 rows of a tile are the same row.
  void accumulate(const std::uint16_t* weights, std::size_t weights_stride, std::size_t num_rows,
                  const std::uint16_t* values, std::size_t, std::size_t, float* outs, std::size_t outs_stride,
                  std::size_t columns) {
    if (num_rows > kRowsPerTile) {
      accumulate_tiles<2>(weights, weights_stride, values, outs, outs_stride, columns);
    } else {
      accumulate_tiles<1>(weights, weights_stride, values, outs, outs_stride, columns);
    }
  }

 private:
  template <std::size_t Down>
  void score_tiles(const std::uint16_t* queries, const std::uint16_t* keys, std::size_t depth,
                   float* scores) {
    // Compilers do not know that loads of tiles read memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (std::size_t key = 0; key < kKeysPerBlock; key += 2 * kRowsPerTile) {
      zero_sums<Down, 2>(tiles_);
      for (std::size_t d = 0; d < depth; d += kDepthPerTile) {
        multiply_step<Down, 2>(tiles_, queries + d, depth * sizeof(*queries), kRowsPerTile * depth,
                               keys + key * depth + d * kRowsPerTile, kRowsPerTile * depth);
      }
      store_sums<Down, 2>(tiles_, scores + key, kKeysPerBlock);
    }
  }

  template <std::size_t Down>
  void accumulate_tiles(const std::uint16_t* weights, std::size_t weights_stride, const std::uint16_t* values,
                        float* outs, std::size_t outs_stride, std::size_t columns) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::size_t d = 0;
    for (; d + 2 * kRowsPerTile <= columns; d += 2 * kRowsPerTile) {
      accumulate_columns<Down, 2>(weights, weights_stride, values + d * kKeysPerBlock, outs + d, outs_stride);
    }
    if (d < columns) {
      accumulate_columns<Down, 1>(weights, weights_stride, values + d * kKeysPerBlock, outs + d, outs_stride);
    }
  }

  template <std::size_t Down, std::size_t Across>
  void accumulate_columns(const std::uint16_t* weights, std::size_t weights_stride,
                          const std::uint16_t* values, float* outs, std::size_t row_floats) {
    load_sums<Down, Across>(tiles_, outs, row_floats);
    for (std::size_t key = 0; key < kKeysPerBlock; key += kDepthPerTile) {
      multiply_step<Down, Across>(tiles_, weights + key, weights_stride * sizeof(*weights),
                                  kRowsPerTile * weights_stride, values + key * kRowsPerTile,
                                  kKeysPerBlock * kRowsPerTile);
    }
    store_sums<Down, Across>(tiles_, outs, row_floats);
  }

  Tiles tiles_;
};

}  // namespace
}  // namespace chunkrt
