// The products of attention in bfloat16 with vectors, for kernels/attention/tiles.h: a pair of bfloat16 of a
// row, in all lanes, times the pairs of 16 columns, which are keys or dimensions of values.
//
// `Pairs` names the operations on 16 lanes of pairs: Operand, load, broadcast, and add, which adds both
// products of each lane to a sum. It also names the tile of sums that the registers hold, kRows by kVectors.
// `Pairs` is FusedPairs, or DotPairs (avx512bf16.cc).
//
// Scores in int8 have the same layout, with four integers in place of a pair. `Quads` names the same
// operations on them, with integer sums in the bits of Floats, and total(sums, row_sum), which returns the
// integers; row_sum is the sum of the integers of the row.
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <array>
#include <utility>

#include "kernels/attention/tile_operations.h"
#include "kernels/lanes/lanes.h"

namespace chunkrt {
namespace {

// A pair of a row, or four integers, in all lanes.
CHUNKRT_LANES Ints broadcast_word(const std::uint16_t* from) {
  int word;
  std::memcpy(&word, from, sizeof(word));
  return all_ints(word);
}

// Two multiply-adds in float32, for processors without an instruction for pairs. The product of two bfloat16
// is exact, so a multiply-add rounds once.
struct FusedPairs {
  struct Operand {
    Floats first, second;
  };
  static constexpr std::size_t kRows = kPairRows, kVectors = kPairVectors;
  static constexpr bool kAreBytes = false;

  CHUNKRT_LANES static Operand load(const std::uint16_t* pairs) { return widened(load_ints(pairs)); }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* pair) { return widened(broadcast_word(pair)); }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    return multiply_add(left.second, right.second, multiply_add(left.first, right.first, sum));
  }

 private:
  CHUNKRT_LANES static Operand widened(Ints pairs) {
    return {from_bits(shift_left<16>(pairs)), from_bits(pairs & all_ints(static_cast<int>(0xffff0000u)))};
  }
};

// Strides of rows x columns sums of products of `left` [rows, 2 * num_pairs] and `right` [columns / 16,
// num_pairs, 16, 2]: the distances of rows, and of 16 columns.
struct PairStrides {
  std::size_t left, right, sums;
  std::size_t num_pairs;
  bool begin_at_zero;  // otherwise the products are added to the sums
};

// Integer sums in float32, times the scales of their row and column. `row` is a ByteRow, and `scales` those
// of 16 columns.
template <typename Quads>
CHUNKRT_LANES Floats scaled(Floats sums, const std::uint16_t* row, std::size_t depth, const float* scales) {
  float scale;
  std::int32_t sum;
  std::memcpy(&scale, reinterpret_cast<const std::byte*>(row) + depth, sizeof(scale));
  std::memcpy(&sum, reinterpret_cast<const std::byte*>(row) + depth + sizeof(scale), sizeof(sum));
  return to_floats(Quads::total(bits_of(sums), sum)) * load(scales) * all(scale);
}

template <typename Pairs, std::size_t M, std::size_t V>
[[gnu::noinline]] void add_pairs(const std::uint16_t* left, const std::uint16_t* right, float* out,
                                 const PairStrides& strides) {
  [[maybe_unused]] const std::uint16_t* const rows = left;
  Floats sums[M][V];
#pragma GCC unroll 12
  for (std::size_t m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) {
      sums[m][v] = strides.begin_at_zero ? all(0.0f) : load(out + m * strides.sums + v * kLanes);
    }
  }
  for (std::size_t pair = 0; pair < strides.num_pairs; ++pair, left += 2, right += 2 * kLanes) {
    typename Pairs::Operand columns[V];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) columns[v] = Pairs::load(right + v * strides.right);
#pragma GCC unroll 12
    for (std::size_t m = 0; m < M; ++m) {
      const typename Pairs::Operand row = Pairs::broadcast(left + m * strides.left);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < V; ++v) sums[m][v] = Pairs::add(row, columns[v], sums[m][v]);
    }
  }
#pragma GCC unroll 12
  for (std::size_t m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) {
      if constexpr (Pairs::kAreBytes) {  // `right` is now at the columns' scales
        const auto* const scales = reinterpret_cast<const float*>(right + v * strides.right);
        sums[m][v] = scaled<Pairs>(sums[m][v], rows + m * strides.left, strides.left, scales);
      }
      store(out + m * strides.sums + v * kLanes, sums[m][v]);
    }
  }
}

// `Scores` is `Pairs`, or the Quads of scores in int8.
template <typename Pairs, typename Scores = Pairs>
class PairProducts {
 public:
  static constexpr std::size_t kRowsAtOnce = kMostRowsAtOnce;
  static constexpr bool kHasByteScores = Scores::kAreBytes;

  void score(const std::uint16_t* queries, std::size_t num_rows, const std::uint16_t* keys, std::size_t depth,
             std::size_t end_key, float* scores) {
    multiply<Scores>(queries, num_rows, keys, (end_key + kLanes - 1) / kLanes, scores,
                     {.left = depth,
                      .right = kRowsPerTile * depth,
                      .sums = kKeysPerBlock,
                      .num_pairs = kHasByteScores ? depth / 4 : depth / 2,
                      .begin_at_zero = true});
  }

  void accumulate(const std::uint16_t* weights, std::size_t weights_stride, std::size_t num_rows,
                  const std::uint16_t* values, std::size_t begin_key, std::size_t end_key, float* outs,
                  std::size_t outs_stride, std::size_t columns) {
    const std::size_t begin = begin_key / 2, end = (end_key + 1) / 2;
    multiply<Pairs>(weights + 2 * begin, num_rows, values + begin * kDepthPerTile, columns / kLanes, outs,
                    {.left = weights_stride,
                     .right = kKeysPerBlock * kRowsPerTile,
                     .sums = outs_stride,
                     .num_pairs = end - begin,
                     .begin_at_zero = false});
  }

 private:
  using Function = void(const std::uint16_t* left, const std::uint16_t* right, float* out,
                        const PairStrides& strides);

  // Element [v][m] multiplies m + 1 rows by v + 1 vectors of columns.
  template <typename Operands, std::size_t V, std::size_t... M>
  static constexpr std::array<Function*, Operands::kRows> of_width(std::index_sequence<M...>) {
    return {add_pairs<Operands, M + 1, V>...};
  }
  template <typename Operands, std::size_t... V>
  static constexpr std::array<std::array<Function*, Operands::kRows>, Operands::kVectors> functions(
      std::index_sequence<V...>) {
    return {of_width<Operands, V + 1>(std::make_index_sequence<Operands::kRows>())...};
  }

  // The largest tiles of sums, and narrower or lower ones at the ends.
  template <typename Operands>
  static void multiply(const std::uint16_t* left, std::size_t num_rows, const std::uint16_t* right,
                       std::size_t num_vectors, float* out, const PairStrides& strides) {
    constexpr std::size_t kRows = Operands::kRows, kVectors = Operands::kVectors;
    static constexpr auto kFunctions = functions<Operands>(std::make_index_sequence<kVectors>());
    for (std::size_t vector = 0, width; vector < num_vectors; vector += width) {
      width = num_vectors - vector < kVectors ? num_vectors - vector : kVectors;
      for (std::size_t row = 0, height; row < num_rows; row += height) {
        height = num_rows - row < kRows ? num_rows - row : kRows;
        kFunctions[width - 1][height - 1](left + row * strides.left, right + vector * strides.right,
                                          out + row * strides.sums + vector * kLanes, strides);
      }
    }
  }
};

}  // namespace
}  // namespace chunkrt
