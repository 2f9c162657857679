// The products of attention in bfloat16 with vectors, for kernels/attention/tiles.h: a pair of bfloat16 of a
// row, in all lanes, times the pairs of 16 columns, which are keys or dimensions of values.
//
// `Pairs` names the operations on 16 lanes of pairs: Operand, load, broadcast, and add, which adds both
// products of each lane to a sum. It also names the tile of sums that the registers hold, kRows by kVectors.
// `Pairs` is FusedPairs, or DotPairs (avx512bf16.cc).
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <array>
#include <utility>

#include "kernels/attention/tile_operations.h"
#include "kernels/lanes/lanes.h"

namespace chunkrt {
namespace {

// Two multiply-adds in float32, for processors without an instruction for pairs. The product of two bfloat16
// is exact, so a multiply-add rounds once.
struct FusedPairs {
  struct Operand {
    Floats first, second;
  };
  static constexpr std::size_t kRows = kPairRows, kVectors = kPairVectors;

  CHUNKRT_LANES static Operand load(const std::uint16_t* pairs) { return widened(load_ints(pairs)); }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* pair) {
    int both;
    std::memcpy(&both, pair, sizeof(both));
    return widened(all_ints(both));
  }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    return multiply_add(left.second, right.second, multiply_add(left.first, right.first, sum));
  }

 private:
  CHUNKRT_LANES static Operand widened(Ints pairs) {
    return {from_bits(shift_left<16>(pairs)), from_bits(pairs & all_ints(static_cast<int>(0xffff0000u)))};
  }
};

// Operands of rows x columns sums of products: `left` is [rows, 2 * num_pairs], and `right` is
// [columns / 16, num_pairs, 16, 2], where the strides are the distances of rows, and of 16 columns.
struct PairMatrices {
  const std::uint16_t* left;
  std::size_t left_stride;
  const std::uint16_t* right;
  std::size_t right_stride;
  std::size_t num_pairs;
  float* sums;
  std::size_t sums_stride;
  bool begin_at_zero;  // otherwise the products are added to the sums
};

template <typename Pairs, std::size_t M, std::size_t V>
[[gnu::noinline]] void add_pairs(PairMatrices of) {
  Floats sums[M][V];
#pragma GCC unroll 12
  for (std::size_t m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) {
      sums[m][v] = of.begin_at_zero ? all(0.0f) : load(of.sums + m * of.sums_stride + v * kLanes);
    }
  }
  const std::uint16_t *left = of.left, *right = of.right;
  for (std::size_t pair = 0; pair < of.num_pairs; ++pair, left += 2, right += 2 * kLanes) {
    typename Pairs::Operand columns[V];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) columns[v] = Pairs::load(right + v * of.right_stride);
#pragma GCC unroll 12
    for (std::size_t m = 0; m < M; ++m) {
      const typename Pairs::Operand row = Pairs::broadcast(left + m * of.left_stride);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < V; ++v) sums[m][v] = Pairs::add(row, columns[v], sums[m][v]);
    }
  }
#pragma GCC unroll 12
  for (std::size_t m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) store(of.sums + m * of.sums_stride + v * kLanes, sums[m][v]);
  }
}

template <typename Pairs>
class PairProducts {
 public:
  void score(const std::uint16_t* queries, std::size_t num_rows, const std::uint16_t* keys, std::size_t depth,
             std::size_t end_key, float* scores) {
    multiply({.left = queries,
              .left_stride = depth,
              .right = keys,
              .right_stride = kRowsPerTile * depth,
              .num_pairs = depth / 2,
              .sums = scores,
              .sums_stride = kKeysPerBlock,
              .begin_at_zero = true},
             num_rows, (end_key + kLanes - 1) / kLanes);
  }

  void accumulate(const std::uint16_t* weights, std::size_t weights_stride, std::size_t num_rows,
                  const std::uint16_t* values, std::size_t begin_key, std::size_t end_key, float* outs,
                  std::size_t outs_stride, std::size_t columns) {
    const std::size_t begin = begin_key / 2, end = (end_key + 1) / 2;
    multiply({.left = weights + 2 * begin,
              .left_stride = weights_stride,
              .right = values + begin * kDepthPerTile,
              .right_stride = kKeysPerBlock * kRowsPerTile,
              .num_pairs = end - begin,
              .sums = outs,
              .sums_stride = outs_stride,
              .begin_at_zero = false},
             num_rows, columns / kLanes);
  }

 private:
  static constexpr std::size_t kRows = Pairs::kRows, kVectors = Pairs::kVectors;
  using Function = void(PairMatrices);

  // Element [i] multiplies i + 1 rows.
  template <std::size_t V, std::size_t... I>
  static constexpr std::array<Function*, sizeof...(I)> functions(std::index_sequence<I...>) {
    return {add_pairs<Pairs, I + 1, V>...};
  }

  // The largest tiles of sums, and narrower or lower ones at the ends.
  static void multiply(PairMatrices of, std::size_t num_rows, std::size_t num_vectors) {
    static constexpr auto kWide = functions<kVectors>(std::make_index_sequence<kRows>());
    static constexpr auto kNarrow = functions<1>(std::make_index_sequence<kRows>());
    for (std::size_t vector = 0, width; vector < num_vectors; vector += width) {
      const bool is_wide = num_vectors - vector >= kVectors;
      width = is_wide ? kVectors : 1;
      PairMatrices part = of;
      for (std::size_t row = 0, height; row < num_rows; row += height) {
        height = num_rows - row < kRows ? num_rows - row : kRows;
        part.left = of.left + row * of.left_stride;
        part.sums = of.sums + row * of.sums_stride;
        (is_wide ? kWide : kNarrow)[height - 1](part);
      }
      of.right += width * of.right_stride;
      of.sums += width * kLanes;
    }
  }
};

}  // namespace
}  // namespace chunkrt
