// attention in bfloat16 with NEON's bfmmla, which multiplies 2 rows by 2 columns at a depth of 4, into a 2 x
// 2 tile of sums.
//
// The layout of keys and values (tile_operations.h) stores pairs of depth of a column together, so one zip of
// two adjacent pairs yields the 4 values of two columns. The rows of a left operand are joined in twos. An
// odd last row is joined with itself. bfmmla adds the products of two pairs to a sum one after the other,
// each rounded, as two bfdot do, and treats subnormal numbers as 0.
//
// Scores in int8 have the same layout with four integers in place of a pair, and smmla multiplies 2 rows by 2
// columns at a depth of 8 into integer sums, which here are the bits of float32.
#include <arm_neon.h>

#include <array>
#include <utility>

#include "kernels/attention/tiles.h"
#include "kernels/lanes/lanes.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kColumns = 8;  // columns of a tile of sums
constexpr std::size_t kJoinedRows = 2 * kRowsPerTile;
constexpr std::size_t kMostRowPairs = 4;   // pairs of rows of a tile of sums: 16 of 32 registers
constexpr std::size_t kJoinedDepth = 128;  // depth that is multiplied before sums pass through memory

bfloat16x8_t load_pairs(const std::uint16_t* from) { return vreinterpretq_bf16_u16(vld1q_u16(from)); }

// Four dimensions of columns 0 and 1, and of columns 2 and 3, from two adjacent pairs of dimensions of four
// columns.
struct ColumnPairs {
  bfloat16x8_t first, second;
};
ColumnPairs zip_columns(const std::uint16_t* pairs) {
  const uint32x4_t a = vreinterpretq_u32_u16(vld1q_u16(pairs));
  const uint32x4_t b = vreinterpretq_u32_u16(vld1q_u16(pairs + kDepthPerTile));
  return {vreinterpretq_bf16_u32(vzip1q_u32(a, b)), vreinterpretq_bf16_u32(vzip2q_u32(a, b))};
}

// Rows joined in twos: [row pairs, depth / 4, 2 rows, 4].
class JoinedRows {
 public:
  // `depth` is a multiple of 4, and at most kJoinedDepth.
  void join(const std::uint16_t* rows, std::size_t stride, std::size_t num_rows, std::size_t depth) {
    depth_ = depth;
    std::uint16_t* to = joined_;
    for (std::size_t row = 0; row < num_rows; row += 2) {
      const std::uint16_t* const first = rows + row * stride;
      const std::uint16_t* const second = row + 1 < num_rows ? first + stride : first;
      for (std::size_t d = 0; d < depth; d += 4, to += 8) {
        vst1q_u16(to, vcombine_u16(vld1_u16(first + d), vld1_u16(second + d)));
      }
    }
  }

  const std::uint16_t* pair(std::size_t index) const { return joined_ + 2 * depth_ * index; }
  std::size_t stride() const { return 2 * depth_; }

 private:
  std::size_t depth_ = 0;
  alignas(64) std::uint16_t joined_[kJoinedRows * kJoinedDepth];
};

struct BfloatProducts {
  static constexpr bool kAreBytes = false;
  static float32x4_t add(float32x4_t sums, bfloat16x8_t rows, bfloat16x8_t columns) {
    return vbfmmlaq_f32(sums, rows, columns);
  }
};

struct ByteProducts {
  static constexpr bool kAreBytes = true;
  static float32x4_t add(float32x4_t sums, bfloat16x8_t rows, bfloat16x8_t columns) {
    const int8x16_t x = vreinterpretq_s8_bf16(rows), y = vreinterpretq_s8_bf16(columns);
    return vreinterpretq_f32_s32(vmmlaq_s32(vreinterpretq_s32_f32(sums), x, y));
  }
};

struct Matrices {
  const std::uint16_t* left;  // joined rows
  std::size_t left_stride;    // distance of pairs of rows
  const std::uint16_t* right;
  std::size_t depth;
  float* sums;
  std::size_t sums_stride;
  bool begin_at_zero;   // otherwise the products are added to the sums
  bool is_last_single;  // the last pair of rows is a single row
};

// The 2 x 2 tiles of sums of two rows and four columns.
struct Sums {
  float32x4_t first, second;
};
Sums to_tiles(float32x4_t upper, float32x4_t lower) {
  const float64x2_t a = vreinterpretq_f64_f32(upper), b = vreinterpretq_f64_f32(lower);
  return {vreinterpretq_f32_f64(vtrn1q_f64(a, b)), vreinterpretq_f32_f64(vtrn2q_f64(a, b))};
}

template <typename Products, std::size_t RowPairs>
[[gnu::noinline]] void add_products(Matrices of) {
  constexpr std::size_t kFours = kColumns / 4;
  Sums sums[RowPairs][kFours];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < RowPairs; ++m) {
    const bool is_single = m + 1 == RowPairs && of.is_last_single;
    const float* const upper = of.sums + 2 * m * of.sums_stride;
    const float* const lower = is_single ? upper : upper + of.sums_stride;
#pragma GCC unroll 2
    for (std::size_t n = 0; n < kFours; ++n) {
      sums[m][n] = of.begin_at_zero ? Sums{vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}
                                    : to_tiles(vld1q_f32(upper + 4 * n), vld1q_f32(lower + 4 * n));
    }
  }
  const std::uint16_t *left = of.left, *right = of.right;
  for (std::size_t d = 0; d < of.depth; d += 4, left += 8, right += 2 * kDepthPerTile) {
    ColumnPairs columns[kFours];
#pragma GCC unroll 2
    for (std::size_t n = 0; n < kFours; ++n) columns[n] = zip_columns(right + 8 * n);
#pragma GCC unroll 4
    for (std::size_t m = 0; m < RowPairs; ++m) {
      const bfloat16x8_t rows = load_pairs(left + m * of.left_stride);
#pragma GCC unroll 2
      for (std::size_t n = 0; n < kFours; ++n) {
        sums[m][n].first = Products::add(sums[m][n].first, rows, columns[n].first);
        sums[m][n].second = Products::add(sums[m][n].second, rows, columns[n].second);
      }
    }
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < RowPairs; ++m) {
    const bool is_single = m + 1 == RowPairs && of.is_last_single;
    float* const upper = of.sums + 2 * m * of.sums_stride;
#pragma GCC unroll 2
    for (std::size_t n = 0; n < kFours; ++n) {
      const Sums rows = to_tiles(sums[m][n].first, sums[m][n].second);
      vst1q_f32(upper + 4 * n, rows.first);
      if (!is_single) vst1q_f32(upper + of.sums_stride + 4 * n, rows.second);
    }
  }
}

// Element [i] multiplies i + 1 pairs of rows.
template <typename Products, std::size_t... I>
constexpr std::array<void (*)(Matrices), sizeof...(I)> functions(std::index_sequence<I...>) {
  return {add_products<Products, I + 1>...};
}

// Multiplies the integer sums of scores by the scales of their query, a ByteRow, and of their key.
void scale_scores(const std::uint16_t* queries, std::size_t num_rows, const std::uint16_t* keys,
                  std::size_t depth, std::size_t end_key, float* scores) {
  for (std::size_t key = 0; key < end_key; key += kLanes) {
    const Floats key_scales = load(reinterpret_cast<const float*>(keys + key * depth + depth * 8));
    for (std::size_t row = 0; row < num_rows; ++row) {
      float scale;
      std::memcpy(&scale, reinterpret_cast<const std::byte*>(queries + row * depth) + depth, sizeof(scale));
      float* const sums = scores + row * kKeysPerBlock + key;
      store(sums, to_floats(bits_of(load(sums))) * key_scales * all(scale));
    }
  }
}

template <typename Scores>
class MatrixProducts {
 public:
  static constexpr std::size_t kRowsAtOnce = kJoinedRows;
  static constexpr bool kHasByteScores = Scores::kAreBytes;

  void score(const std::uint16_t* queries, std::size_t num_rows, const std::uint16_t* keys, std::size_t depth,
             std::size_t end_key, float* scores) {
    const std::size_t length = kHasByteScores ? depth / 2 : depth;  // in bfloat16
    for (std::size_t d = 0; d < length; d += kJoinedDepth) {
      rows_.join(queries + d, depth, num_rows, smaller(kJoinedDepth, length - d));
      for (std::size_t key = 0; key < end_key; key += kColumns) {
        multiply<Scores>({.left = nullptr,
                          .left_stride = rows_.stride(),
                          .right = keys + key / kRowsPerTile * kRowsPerTile * depth + d * kRowsPerTile +
                                   key % kRowsPerTile * 2,
                          .depth = smaller(kJoinedDepth, length - d),
                          .sums = scores + key,
                          .sums_stride = kKeysPerBlock,
                          .begin_at_zero = d == 0,
                          .is_last_single = false},
                         num_rows);
      }
    }
    if constexpr (kHasByteScores) scale_scores(queries, num_rows, keys, depth, end_key, scores);
  }

  void accumulate(const std::uint16_t* weights, std::size_t weights_stride, std::size_t num_rows,
                  const std::uint16_t* values, std::size_t begin_key, std::size_t end_key, float* outs,
                  std::size_t outs_stride, std::size_t columns) {
    const std::size_t begin = begin_key / 4 * 4, depth = (end_key + 3) / 4 * 4 - begin;
    rows_.join(weights + begin, weights_stride, num_rows, depth);
    for (std::size_t d = 0; d < columns; d += kColumns) {
      multiply<BfloatProducts>({.left = nullptr,
                                .left_stride = rows_.stride(),
                                .right = values + d / kRowsPerTile * kRowsPerTile * kKeysPerBlock +
                                         begin * kRowsPerTile + d % kRowsPerTile * 2,
                                .depth = depth,
                                .sums = outs + d,
                                .sums_stride = outs_stride,
                                .begin_at_zero = false,
                                .is_last_single = false},
                               num_rows);
    }
  }

 private:
  template <typename Products>
  void multiply(Matrices of, std::size_t num_rows) const {
    static constexpr auto kFunctions = functions<Products>(std::make_index_sequence<kMostRowPairs>());
    float* const sums = of.sums;
    for (std::size_t row = 0, height; row < num_rows; row += height) {
      height = smaller(2 * kMostRowPairs, num_rows - row);
      of.left = rows_.pair(row / 2);
      of.sums = sums + row * of.sums_stride;
      of.is_last_single = height % 2 != 0;
      kFunctions[(height - 1) / 2](of);
    }
  }

  JoinedRows rows_;
};

}  // namespace

void attend_f32_bf16_cache_neon_bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                     float* scratch) {
  attend_in_bfloat<MatrixProducts<BfloatProducts>>(args, begin, end, scratch, tile_operations_neon());
}

void attend_f32_s8_bf16_cache_neon_bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                        float* scratch) {
  attend_in_bfloat<MatrixProducts<ByteProducts>>(args, begin, end, scratch, tile_operations_neon());
}

}  // namespace chunkrt
