// attention in bfloat16 with matrix tiles: loops that are shared by all tile implementations, over a few
// operations on eight tiles.
//
// A tile is 16 rows of 64 bytes. A left tile holds 32 bfloat16 dimensions of 16 queries, or the weights of 32
// keys for 16 queries. A right tile holds 16 pairs of the other factor, [16 pairs, 16 columns, 2]: pairs of
// dimensions of 16 keys, or pairs of keys of 16 dimensions of values. The product of a left and a right tile,
// 16 x 16 sums in float32, is added to a third tile.
//
// `Tiles` provides configure(rows), which sets the number of rows of sum tiles and left tiles, and the
// operations zero, load_sums, load, multiply and store on tiles that are named by their numbers. `Tiles` is
// AmxBfloatTiles (kernels/tiles_amx.h), or PlainTiles on processors without tiles.
//
// All queries use tiles, even if they are few, so that the result of a row is the same in a chunk and alone.
// A bfloat16 cache stores the factors in this form. With other caches, each item rounds and packs every
// block. For few queries this packing takes most of the time, and the total time is about that of float32
// with AVX2 (4,600 cycles per block for three queries of 64 dimensions). To amortise the packing, an item
// consists of kQueriesPerTileItem queries. Packing float16 caches then takes 13 % of an item's time with 64
// dimensions and 21 % with 128 (23 and 34 % with half as many queries), softmax takes 77 and 63 %, and tiles
// take 10 and 17 %. The vector parts were measured on Zen 3; a product of tiles is counted as 16 cycles.
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <math.h>

#include <atomic>
#include <cstring>

#include "kernels/attention/tile_operations.h"
#include "kernels/tile_pairs.h"

namespace chunkrt {
namespace {

std::size_t smaller(std::size_t left, std::size_t right) { return left < right ? left : right; }

// Distance of `key` from `start`, at most `most`.
std::size_t distance(std::size_t start, std::size_t key, std::size_t most) {
  return key > start ? smaller(key - start, most) : 0;
}

// Computes the scores of Down tiles of queries and the keys of a block, both in the layout of TileSizes.
template <std::size_t Down, typename Tiles>
void score_block(Tiles& tiles, const std::uint16_t* queries, const std::uint16_t* keys, std::size_t depth,
                 float* scores) {
  // Compilers do not know that loads of tiles read memory.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (std::size_t key = 0; key < kKeysPerBlock; key += 2 * kRowsPerTile) {
    zero_sums<Down, 2>(tiles);
    for (std::size_t d = 0; d < depth; d += kDepthPerTile) {
      multiply_step<Down, 2>(tiles, queries + d, depth * sizeof(*queries), kRowsPerTile * depth,
                             keys + key * depth + d * kRowsPerTile, kRowsPerTile * depth);
    }
    store_sums<Down, 2>(tiles, scores + key, kKeysPerBlock);
  }
}

template <std::size_t Down, std::size_t Across, typename Tiles>
void accumulate_columns(Tiles& tiles, const std::uint16_t* weights, std::size_t weights_stride,
                        const std::uint16_t* values, float* outs, std::size_t row_floats) {
  load_sums<Down, Across>(tiles, outs, row_floats);
  for (std::size_t key = 0; key < kKeysPerBlock; key += kDepthPerTile) {
    multiply_step<Down, Across>(tiles, weights + key, weights_stride * sizeof(*weights),
                                kRowsPerTile * weights_stride, values + key * kRowsPerTile,
                                kKeysPerBlock * kRowsPerTile);
  }
  store_sums<Down, Across>(tiles, outs, row_floats);
}

// outs += weights @ values for Down tiles of rows. If the strides are 0, the 16 rows of a tile are the same
// row.
template <std::size_t Down, typename Tiles>
void accumulate_block(Tiles& tiles, const std::uint16_t* weights, std::size_t weights_stride,
                      const std::uint16_t* values, float* outs, std::size_t outs_stride,
                      std::size_t columns) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::size_t d = 0;
  for (; d + 2 * kRowsPerTile <= columns; d += 2 * kRowsPerTile) {
    accumulate_columns<Down, 2>(tiles, weights, weights_stride, values + d * kKeysPerBlock, outs + d,
                                outs_stride);
  }
  if (d < columns) {
    accumulate_columns<Down, 1>(tiles, weights, weights_stride, values + d * kKeysPerBlock, outs + d,
                                outs_stride);
  }
}

// An item's operands in scratch, and the data that all of its blocks share.
template <typename Tiles>
class TileItem {
 public:
  TileItem(Tiles& tiles, const AttentionArgs& args, const AttendItem& item, float* scratch,
           const TileOperations& operations)
      : tiles_(tiles),
        args_(args),
        item_(item),
        operations_(operations),
        sizes_(tile_sizes(args.head_dim)),
        row_bytes_(row_bytes(args)) {
    const auto take = [&scratch](std::size_t floats) {
      float* const taken = scratch;
      scratch += floats;
      return taken;
    };
    queries_ = reinterpret_cast<std::uint16_t*>(take(sizes_.queries));
    block_keys_ = keys_ = reinterpret_cast<std::uint16_t*>(take(sizes_.keys));
    block_values_ = values_ = reinterpret_cast<std::uint16_t*>(take(sizes_.values));
    weights_ = reinterpret_cast<std::uint16_t*>(take(sizes_.weights));
    outs_ = take(sizes_.outs);
    rows_ = take(sizes_.rows);
    scores_ = take(sizes_.scores);
  }

  void attend() {
    begin_queries();
    first_key_ = find_query(args_, item_.kv_head, item_.first_query).first_key;
    end_key_ = find_query(args_, item_.kv_head, item_.first_query + item_.num_queries - 1).end_key;
    for (std::size_t start = first_key_ / kKeysPerBlock * kKeysPerBlock; start < end_key_;
         start += kKeysPerBlock) {
      take_block(start);
      for (std::size_t row = 0; row < item_.num_queries; row += kRowsAtOnce) {
        if (item_.num_queries - row > kRowsPerTile) {
          attend_rows<2>(start, row);
        } else {
          attend_rows<1>(start, row);
        }
      }
    }
    end_queries();
  }

 private:
  void begin_queries() {
    const std::size_t num_rows = (item_.num_queries + kRowsPerTile - 1) / kRowsPerTile * kRowsPerTile;
    std::memset(rows_, 0, sizes_.depth * sizeof(float));
    std::memset(queries_, 0, num_rows * sizes_.depth * sizeof(std::uint16_t));
    std::memset(outs_, 0, num_rows * sizes_.columns * sizeof(float));
    for (std::size_t i = 0; i < item_.num_queries; ++i) {
      const Query query = find_query(args_, item_.kv_head, item_.first_query + i);
      operations_.rope(query.input, query.cos, query.sin, args_.head_dim, args_.rotary_dim, args_.scale,
                       rows_);
      operations_.round(rows_, queries_ + i * sizes_.depth, sizes_.depth);
      maxima_[i] = -INFINITY;
      sums_[i] = 0.0f;
      first_keys_[i] = query.first_key;
      end_keys_[i] = query.end_key;
    }
  }

  void end_queries() {
    for (std::size_t i = 0; i < item_.num_queries; ++i) {
      float* const out = find_query(args_, item_.kv_head, item_.first_query + i).out;
      const float* const sums = outs_ + i * sizes_.columns;
      const float inverse = 1.0f / sums_[i];
      // Adding 0 makes zeros positive, because their sign must not depend on the number of blocks that other
      // rows of the tile attend to.
      for (std::size_t d = 0; d < args_.head_dim; ++d) out[d] = sums[d] * inverse + 0.0f;
    }
  }

  // Returns 16 rows of a cache from the key `start` on in float32, [16, depth]: the cache itself or a copy.
  // Rows before `begin` and from `end` on are zeros, regardless of the cache.
  const float* sixteen_rows(const void* cache, std::size_t start, std::size_t begin, std::size_t end,
                            bool are_raw) {
    const std::size_t head_dim = args_.head_dim, depth = sizes_.depth;
    begin = distance(start, begin, kRowsPerTile);
    end = distance(start, end, kRowsPerTile);
    const std::size_t offset = cache_offset(args_, item_.kv_head, start);
    const auto* const stored = static_cast<const std::byte*>(cache) + offset;
    const bool is_whole = begin == 0 && end == kRowsPerTile && head_dim == depth;
    if (is_whole && !are_raw && args_.cache_type == CacheType::float32) {
      return reinterpret_cast<const float*>(stored);
    }
    if (!is_whole) std::memset(rows_, 0, sizes_.rows * sizeof(float));
    for (std::size_t i = begin; i < end; ++i) {
      float* const row = rows_ + i * depth;
      widen(stored + i * row_bytes_, are_raw ? key_bias(args_, item_.kv_head) : nullptr, row);
      if (!are_raw) continue;
      const std::size_t index = table_index(args_, start + i);
      operations_.rope(row, args_.cos + index, args_.sin + index, head_dim, args_.rotary_dim, 1.0f, row);
    }
    return rows_;
  }

  // Returns one row of a cache, plus the bias that the cache omits.
  void widen(const std::byte* stored, const float* bias, float* row) {
    switch (args_.cache_type) {
      case CacheType::float32:
        std::memcpy(row, stored, args_.head_dim * sizeof(float));
        return;
      case CacheType::float16:
        operations_.widen(reinterpret_cast<const std::uint16_t*>(stored), row, args_.head_dim);
        return;
      case CacheType::bfloat16:
        return;  // its blocks are in tile layout
      case CacheType::int8:
        operations_.dequantize(stored, args_.head_dim, bias, row);
    }
  }

  // Packs keys and values for all rows. A bfloat16 cache stores them in tile layout; its values are packed
  // again only if some row does not attend to all of them.
  void take_block(std::size_t start) {
    if (args_.cache_type != CacheType::bfloat16) {
      pack_keys(start);
      are_finite_ = pack_values(start, first_key_, end_key_);
      return;
    }
    block_keys_ = tiled_block(args_, args_.key_cache, item_.kv_head, start);
    if (first_keys_[item_.num_queries - 1] <= start && start + kKeysPerBlock <= end_keys_[0]) {
      block_values_ = tiled_block(args_, args_.value_cache, item_.kv_head, start);
      are_finite_ = true;  // or irrelevant, because all rows attend to all values
    } else {
      block_values_ = values_;
      are_finite_ = pack_values(start, first_key_, end_key_);
    }
  }

  void pack_keys(std::size_t start) {
    for (std::size_t key = 0; key < kKeysPerBlock; key += kRowsPerTile) {
      const float* const rows =
          sixteen_rows(args_.key_cache, start + key, first_key_, end_key_, args_.has_raw_keys);
      operations_.pack_keys(rows, sizes_.depth, keys_ + key * sizes_.depth);
    }
  }

  // Packs the values of the keys in [begin, end), with zeros for the other keys of the block. Returns true if
  // all values are finite.
  bool pack_values(std::size_t start, std::size_t begin, std::size_t end) {
    if (args_.cache_type == CacheType::bfloat16) {
      return copy_values(tiled_block(args_, args_.value_cache, item_.kv_head, start),
                         distance(start, begin, kKeysPerBlock), distance(start, end, kKeysPerBlock));
    }
    bool are_finite = true;
    for (std::size_t key = 0; key < kKeysPerBlock; key += kRowsPerTile) {
      const float* const rows = sixteen_rows(args_.value_cache, start + key, begin, end, false);
      are_finite &= operations_.pack_values(rows, sizes_.depth, sizes_.columns, values_ + key * kRowsPerTile);
    }
    return are_finite;
  }

  // Like pack_values, for a block that is already packed; keeps the keys in [begin, end).
  bool copy_values(const std::uint16_t* packed, std::size_t begin, std::size_t end) {
    const auto bits_of = [=](std::size_t key) { return begin <= key && key < end ? 0xffffu : 0u; };
    std::uint32_t not_finite = 0;
    for (std::size_t line = 0; line < sizes_.columns * 2; ++line) {  // 16 columns, two keys
      const std::size_t key = line % (kKeysPerBlock / 2) * 2;
      const std::uint32_t seen = bits_of(key) | bits_of(key + 1) << 16;
      std::uint32_t pairs[kRowsPerTile];
      std::memcpy(pairs, packed + line * kDepthPerTile, sizeof(pairs));
      for (std::uint32_t& pair : pairs) {
        pair &= seen;
        // If all bits of the exponent are ones, the addition carries into the sign bit.
        not_finite |= ((pair & 0x7f80u) + 0x80u) | ((pair >> 16 & 0x7f80u) + 0x80u);
      }
      std::memcpy(values_ + line * kDepthPerTile, pairs, sizeof(pairs));
    }
    return (not_finite & 0x8000u) == 0;
  }

  // Processes one block for Down tiles of queries that start at `row`.
  template <std::size_t Down>
  void attend_rows(std::size_t start, std::size_t row) {
    const std::size_t num_rows = smaller(Down * kRowsPerTile, item_.num_queries - row);
    std::size_t first[Down * kRowsPerTile], visible[Down * kRowsPerTile];
    const std::size_t packed_first = distance(start, first_key_, kKeysPerBlock);
    const std::size_t packed_end = distance(start, end_key_, kKeysPerBlock);
    bool is_seen = false, see_all = true;
    for (std::size_t i = 0; i < num_rows; ++i) {
      first[i] = distance(start, first_keys_[row + i], kKeysPerBlock);
      visible[i] = distance(start, end_keys_[row + i], kKeysPerBlock);
      is_seen |= first[i] < visible[i];
      see_all &= first[i] == packed_first && visible[i] == packed_end;
    }
    if (!is_seen) return;
    float* const outs = outs_ + row * sizes_.columns;
    score_block<Down>(tiles_, queries_ + row * sizes_.depth, block_keys_, sizes_.depth, scores_);
    operations_.weigh({.scores = scores_,
                       .weights = weights_,
                       .outs = outs,
                       .maxima = maxima_ + row,
                       .sums = sums_ + row,
                       .first = first,
                       .visible = visible,
                       .num_rows = num_rows,
                       .columns = sizes_.columns});
    if (are_finite_ || see_all) {
      accumulate_block<Down>(tiles_, weights_, kKeysPerBlock, block_values_, outs, sizes_.columns,
                             sizes_.columns);
    } else {
      accumulate_row_by_row(start, first, visible, num_rows, outs);
    }
  }

  // Some value is not finite, and a weight of 0 does not exclude such a value from a row that does not attend
  // to it. So the visible values are packed for each row separately.
  void accumulate_row_by_row(std::size_t start, const std::size_t* first, const std::size_t* visible,
                             std::size_t num_rows, float* outs) {
    for (std::size_t i = 0; i < num_rows; ++i) {
      if (first[i] >= visible[i]) continue;
      if (i == 0 || first[i] != first[i - 1] || visible[i] != visible[i - 1]) {
        pack_values(start, start + first[i], start + visible[i]);
      }
      accumulate_block<1>(tiles_, weights_ + i * kKeysPerBlock, 0, values_, outs + i * sizes_.columns, 0,
                          sizes_.columns);
    }
    pack_values(start, first_key_, end_key_);
  }

  Tiles& tiles_;
  const AttentionArgs& args_;
  const AttendItem item_;
  const TileOperations& operations_;
  const TileSizes sizes_;
  const std::size_t row_bytes_;  // row of the caches
  std::uint16_t *queries_, *keys_, *values_, *weights_;
  const std::uint16_t *block_keys_,
      *block_values_;  // for the current block: keys_ and values_, or the cache's
  float *outs_, *rows_, *scores_;
  float maxima_[kQueriesPerTileItem], sums_[kQueriesPerTileItem];
  std::size_t first_keys_[kQueriesPerTileItem], end_keys_[kQueriesPerTileItem];
  std::size_t first_key_, end_key_;  // for the item
  bool are_finite_;                  // the block's values
};

template <typename Tiles>
void attend_by_tiles(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                     const TileOperations& operations) {
  Tiles tiles;
  tiles.configure(kRowsPerTile);
  for (std::size_t index = begin; index < end; ++index) {
    TileItem<Tiles>(tiles, args, attend_item(args, index), scratch, operations).attend();
  }
}

}  // namespace
}  // namespace chunkrt
