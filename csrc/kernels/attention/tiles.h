// attention in bfloat16: the loops over items, key blocks and rows, shared by all instruction sets.
//
// `Products` computes the two matrix products of a block:
// - score(queries, num_rows, keys, depth, end_key, scores): scores [num_rows, kKeysPerBlock] of queries
//   [num_rows, depth] and the keys of a block; scores of keys from `end_key` on may be left unspecified
// - accumulate(weights, weights_stride, num_rows, values, begin_key, end_key, outs, outs_stride, columns):
//   outs [num_rows, columns] += weights [num_rows, kKeysPerBlock] @ values; the weights of keys outside of
//   [begin_key, end_key) are 0. The strides are 0 only for one row.
// With Products::kHasByteScores, queries and keys are integers (AttentionMath::int8), and each query is a
// ByteRow. `num_rows` is at most Products::kRowsAtOnce, and keys and values are in the layout of TileSizes. A
// row of a result depends on the row of its left operand only, and its order of additions only on the
// instruction set, so the result of a row is the same in a chunk and alone. (Adding products with weights of
// 0 changes no sum.) `Products` is TileProducts (tile_products.h), PairProducts (pair_products.h) or
// MatrixProducts (neon_bf16.cc).
//
// A bfloat16 cache stores keys and values in this layout. With other caches, each item rounds and packs every
// block. For few queries this packing takes most of the time, and the total time is about that of float32
// with AVX2 (4,600 cycles per block for three queries of 64 dimensions). To amortise the packing, an item of
// such a cache consists of kQueriesPerTileItem queries. Packing float16 caches then takes 13 % of an item's
// time with matrix tiles and 64 dimensions, and 21 % with 128 (23 and 34 % with half as many queries),
// softmax takes 77 and 63 %, and tiles take 10 and 17 %. The vector parts were measured on Zen 3; a product
// of tiles is counted as 16 cycles.
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <cstring>

#include "kernels/attention/tile_operations.h"

namespace chunkrt {
namespace {

std::size_t smaller(std::size_t left, std::size_t right) { return left < right ? left : right; }

// Distance of `key` from `start`, at most `most`.
std::size_t distance(std::size_t start, std::size_t key, std::size_t most) {
  return key > start ? smaller(key - start, most) : 0;
}

// The same bound for every row. (Functions of std::array might be shared with files for other processors.)
template <std::size_t N>
struct Bounds {
  constexpr explicit Bounds(std::size_t value) {
    for (std::size_t& each : of) each = value;
  }
  std::size_t of[N] = {};
};

// An item's operands in scratch, and the data that all of its blocks share.
template <typename Products>
class TileItem {
 public:
  TileItem(Products& products, const AttentionArgs& args, const AttendItem& item, float* scratch,
           const TileOperations& operations)
      : products_(products),
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
    const std::size_t last = item_.num_queries - 1;
    const std::size_t end = query(last).end_key;
    for (std::size_t key = query(0).first_key; key < end; key = span_end(args_, key)) {
      begin_span(key);
      first_key_ = first_keys_[0];
      end_key_ = end_keys_[last];
      for (std::size_t start = first_key_ / kKeysPerBlock * kKeysPerBlock; start < end_key_;
           start += kKeysPerBlock) {
        take_block(start);
        for (std::size_t row = 0; row <= last; row += kRowsAtOnce) attend_rows(start, row);
      }
    }
    end_queries();
  }

 private:
  static constexpr std::size_t kRowsAtOnce = Products::kRowsAtOnce;
  // The bounds of rows that see a complete block.
  static constexpr Bounds<kRowsAtOnce> kFromStart{0}, kToEnd{kKeysPerBlock};
  static_assert(kRowsAtOnce <= kMostRowsAtOnce && kQueriesPerTileItem % kRowsAtOnce == 0);

  void begin_queries() {
    const std::size_t num_rows = (item_.num_queries + kRowsPerTile - 1) / kRowsPerTile * kRowsPerTile;
    std::memset(queries_ + item_.num_queries * sizes_.depth, 0,
                (num_rows - item_.num_queries) * sizes_.depth * sizeof(std::uint16_t));
    std::memset(outs_, 0, num_rows * sizes_.columns * sizeof(float));
    for (std::size_t i = 0; i < item_.num_queries; ++i) {
      const SoftmaxStart softmax = softmax_start(args_, query(i));
      maxima_[i] = softmax.maximum;
      sums_[i] = softmax.sum;
      results_[i] = query(i).out;
    }
  }

  // Ropes the queries for the span of keys that begins with `key`, and finds the keys of the span that each
  // query sees.
  void begin_span(std::size_t key) {
    std::memset(rows_, 0, sizes_.depth * sizeof(float));
    for (std::size_t i = 0; i < item_.num_queries; ++i) {
      const Query found = query(i);
      const auto [cos, sin, scale] = query_rotation(args_, found.position, key);
      operations_.rope(found.input, cos, sin, args_.head_dim, args_.rotary_dim, scale, rows_);
      store_query(queries_ + i * sizes_.depth);
      first_keys_[i] = found.first_key > key ? found.first_key : key;
      end_keys_[i] = smaller(found.end_key, span_end(args_, key));
    }
  }

  Query query(std::size_t index) const { return find_query(args_, item_.kv_head, item_.first_query + index); }

  // Stores the first of rows_ as a left operand of scores.
  void store_query(std::uint16_t* query) {
    const std::size_t depth = sizes_.depth;
    if constexpr (!Products::kHasByteScores) {
      operations_.round(rows_, query, depth);
    } else {
      operations_.pack_bytes(rows_, depth, query);
      *ByteRow(query, depth).scale *= 1.0f / static_cast<float>(num_mixed(depth));  // exact
      std::memset(rows_ + args_.head_dim, 0, (depth - args_.head_dim) * sizeof(float));
    }
  }

  void end_queries() {
    for (std::size_t i = 0; i < item_.num_queries; ++i) {
      float* const out = results_[i];
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
      const auto [cos, sin, scale] = key_rotation(args_, start + i);
      operations_.rope(row, cos, sin, head_dim, args_.rotary_dim, scale, row);
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
  // again only if some row does not attend to all of them, and some are not finite.
  void take_block(std::size_t start) {
    if (args_.cache_type != CacheType::bfloat16) {
      pack_keys(start);
      are_finite_ = pack_values(start, first_key_, end_key_);
      return;
    }
    block_keys_ = tiled_block(args_, args_.key_cache, item_.kv_head, start);
    block_values_ = tiled_block(args_, args_.value_cache, item_.kv_head, start);
    const bool see_all = first_keys_[item_.num_queries - 1] <= start && start + kKeysPerBlock <= end_keys_[0];
    if (see_all || are_values_finite(block_values_)) {
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

  // True if all values of a packed block are finite, whether or not some row sees them.
  bool are_values_finite(const std::uint16_t* packed) const {
    std::uint16_t found = 0;
    for (std::size_t i = 0; i < kKeysPerBlock * sizes_.columns; ++i) {
      // If all bits of the exponent are ones, the addition carries into the sign bit.
      found |= static_cast<std::uint16_t>((packed[i] & 0x7f80u) + 0x80u);
    }
    return (found & 0x8000u) == 0;
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

  // Processes one block for up to kRowsAtOnce queries that start at `row`.
  void attend_rows(std::size_t start, std::size_t row) {
    const std::size_t num_rows = smaller(kRowsAtOnce, item_.num_queries - row);
    const bool is_whole = first_keys_[row + num_rows - 1] <= start && start + kKeysPerBlock <= end_keys_[row];
    std::size_t seen_first[kRowsAtOnce], seen_end[kRowsAtOnce];
    std::size_t begin = 0, end = kKeysPerBlock;  // the keys that some row sees
    bool see_all = is_whole;                     // all keys that the item sees
    if (!is_whole) {
      see_all = find_seen(start, row, num_rows, seen_first, seen_end, &begin, &end);
      if (begin >= end) return;
    }
    const std::size_t* const first = is_whole ? kFromStart.of : seen_first;
    const std::size_t* const visible = is_whole ? kToEnd.of : seen_end;
    float* const outs = outs_ + row * sizes_.columns;
    products_.score(queries_ + row * sizes_.depth, num_rows, block_keys_, sizes_.depth, end, scores_);
    operations_.weigh({.scores = scores_,
                       .weights = weights_,
                       .outs = outs,
                       .maxima = maxima_ + row,
                       .sums = sums_ + row,
                       .first = first,
                       .visible = visible,
                       .is_whole = is_whole,
                       .num_rows = num_rows,
                       .columns = sizes_.columns,
                       .soft_cap = args_.soft_cap});
    if (are_finite_ || see_all) {
      products_.accumulate(weights_, kKeysPerBlock, num_rows, block_values_, begin, end, outs, sizes_.columns,
                           sizes_.columns);
    } else {
      accumulate_row_by_row(start, first, visible, num_rows, outs);
    }
  }

  // Finds the keys of a block that each row sees, and the first and the end of all of them. Returns true if
  // all rows see all keys that the item sees.
  bool find_seen(std::size_t start, std::size_t row, std::size_t num_rows, std::size_t* first,
                 std::size_t* visible, std::size_t* begin, std::size_t* end) const {
    const std::size_t packed_first = distance(start, first_key_, kKeysPerBlock);
    const std::size_t packed_end = distance(start, end_key_, kKeysPerBlock);
    *begin = kKeysPerBlock;
    *end = 0;
    bool see_all = true;
    for (std::size_t i = 0; i < num_rows; ++i) {
      first[i] = distance(start, first_keys_[row + i], kKeysPerBlock);
      visible[i] = distance(start, end_keys_[row + i], kKeysPerBlock);
      if (first[i] < visible[i]) {
        *begin = smaller(*begin, first[i]);
        *end = *end > visible[i] ? *end : visible[i];
      }
      see_all &= first[i] == packed_first && visible[i] == packed_end;
    }
    return see_all;
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
      products_.accumulate(weights_ + i * kKeysPerBlock, 0, 1, values_, first[i], visible[i],
                           outs + i * sizes_.columns, 0, sizes_.columns);
    }
    pack_values(start, first_key_, end_key_);
  }

  Products& products_;
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
  float* results_[kQueriesPerTileItem];
  std::size_t first_keys_[kQueriesPerTileItem], end_keys_[kQueriesPerTileItem];
  std::size_t first_key_, end_key_;  // for the item, in the current span
  bool are_finite_;                  // the block's values
};

template <typename Products>
void attend_in_bfloat(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch,
                      const TileOperations& operations) {
  Products products;
  for (std::size_t index = begin; index < end; ++index) {
    TileItem<Products>(products, args, attend_item(args, index), scratch, operations).attend();
  }
}

}  // namespace
}  // namespace chunkrt
