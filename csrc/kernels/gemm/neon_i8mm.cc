// gemm with NEON's smmla, which multiplies 2 rows by 2 columns over 8 values along k, into a 2 x 2 tile of
// sums.
//
// The packed weights store 4 values along k of a column together, so one zip of two adjacent groups yields
// the 8 values of two columns. If the rows are not arranged in pairs, each pair is joined on loading. An odd
// last row is paired with itself or with unspecified data, and an odd last group with zeros.
#include <arm_neon.h>
#include <string.h>

#include "kernels/gemm/arranged.h"
#include "kernels/gemm/gemm.h"
#include "kernels/store_neon.h"

namespace chunkrt {
namespace {

// Sums fill 16 of the 32 registers: up to 4 pairs of rows by 4 pairs of columns, or, for arranged rows, up to
// 8 by 2 pairs, where 2 zips serve 16 products.
constexpr std::size_t kTileRowPairs = 8;
constexpr std::size_t kLooseRowPairs = 4;
constexpr std::size_t kMostColumnPairs = 4;
constexpr std::size_t column_pairs(std::size_t row_pairs) { return row_pairs <= 4 ? kMostColumnPairs : 2; }
constexpr std::size_t kPairDepth = 2 * kGemmDepthPerGroup;

// Two pairs of columns, with 8 values along k per column, from four columns in two adjacent groups.
void zip_groups(int8x16_t first, int8x16_t second, int8x16_t* pairs) {
  const uint32x4_t a = vreinterpretq_u32_s8(first), b = vreinterpretq_u32_s8(second);
  pairs[0] = vreinterpretq_s8_u32(vzip1q_u32(a, b));
  pairs[1] = vreinterpretq_s8_u32(vzip2q_u32(a, b));
}

int8x8_t load_last_group(const std::int8_t* source) {
  std::uint32_t quad;
  memcpy(&quad, source, sizeof(quad));
  return vreinterpret_s8_u32(vset_lane_u32(quad, vdup_n_u32(0), 0));
}

// Pairs of rows in the layout of arranged.h.
template <std::size_t RowPairs>
class PairedRows {
 public:
  PairedRows(const GemmArgs& args, std::size_t row) {
    const std::size_t pair_bytes = 2 * paired_row_bytes(args.groups);
    for (std::size_t m = 0; m < RowPairs; ++m) pairs_[m] = args.arranged + (row / 2 + m) * pair_bytes;
  }
  int8x16_t load(std::size_t m, std::size_t group) const { return vld1q_s8(pairs_[m] + group * kPairDepth); }
  int8x16_t load_last(std::size_t m, std::size_t group) const { return load(m, group); }

 private:
  const std::int8_t* pairs_[RowPairs];
};

// Rows without arrangement.
template <std::size_t RowPairs>
class LooseRows {
 public:
  LooseRows(const GemmArgs& args, std::size_t row) {
    const std::size_t depth = args.groups * kGemmDepthPerGroup;
    for (std::size_t m = 0; m < RowPairs; ++m) {
      const std::size_t first = row + 2 * m, second = first + 1 < args.rows ? first + 1 : first;
      first_[m] = args.left + first * depth;
      second_[m] = args.left + second * depth;
    }
  }
  int8x16_t load(std::size_t m, std::size_t group) const {
    const std::size_t k = group * kGemmDepthPerGroup;
    return vcombine_s8(vld1_s8(first_[m] + k), vld1_s8(second_[m] + k));
  }
  int8x16_t load_last(std::size_t m, std::size_t group) const {
    const std::size_t k = group * kGemmDepthPerGroup;
    return vcombine_s8(load_last_group(first_[m] + k), load_last_group(second_[m] + k));
  }

 private:
  const std::int8_t *first_[RowPairs], *second_[RowPairs];
};

// `right` points to the columns' weights.
template <std::size_t RowPairs, template <std::size_t> typename Rows>
void compute_tile(const GemmArgs& args, std::size_t row, std::size_t column, const std::int8_t* right) {
  const Rows<RowPairs> rows(args, row);
  constexpr std::size_t kColumnPairs = column_pairs(RowPairs);
  int32x4_t sums[RowPairs][kColumnPairs];
  for (std::size_t m = 0; m < RowPairs; ++m) {
    for (std::size_t c = 0; c < kColumnPairs; ++c) sums[m][c] = vdupq_n_s32(0);
  }
  int8x16_t weights[kColumnPairs];
  std::size_t group = 0;
  for (; group + 2 <= args.groups; group += 2, right += 2 * kGemmBytesPerGroup) {
    for (std::size_t c = 0; c < kColumnPairs; c += 2) {
      zip_groups(vld1q_s8(right + c * 8), vld1q_s8(right + kGemmBytesPerGroup + c * 8), weights + c);
    }
    for (std::size_t m = 0; m < RowPairs; ++m) {
      const int8x16_t activations = rows.load(m, group);
      for (std::size_t c = 0; c < kColumnPairs; ++c) {
        sums[m][c] = vmmlaq_s32(sums[m][c], activations, weights[c]);
      }
    }
  }
  if (group < args.groups) {
    for (std::size_t c = 0; c < kColumnPairs; c += 2) {
      zip_groups(vld1q_s8(right + c * 8), vdupq_n_s8(0), weights + c);
    }
    for (std::size_t m = 0; m < RowPairs; ++m) {
      const int8x16_t activations = rows.load_last(m, group);
      for (std::size_t c = 0; c < kColumnPairs; ++c) {
        sums[m][c] = vmmlaq_s32(sums[m][c], activations, weights[c]);
      }
    }
  }
  for (std::size_t m = 0; m < RowPairs; ++m) {
    for (std::size_t c = 0; c < kColumnPairs; c += 2) {
      const int64x2_t low = vreinterpretq_s64_s32(sums[m][c]), high = vreinterpretq_s64_s32(sums[m][c + 1]);
      const std::size_t first = row + 2 * m;
      store_columns(args, first, column + c * 2, vcvtq_f32_s32(vreinterpretq_s32_s64(vzip1q_s64(low, high))),
                    args.right_scales);
      if (first + 1 < args.rows) {
        store_columns(args, first + 1, column + c * 2,
                      vcvtq_f32_s32(vreinterpretq_s32_s64(vzip2q_s64(low, high))), args.right_scales);
      }
    }
  }
}

// Computes RowPairs pairs of rows for the 16 columns of a block.
template <std::size_t RowPairs, template <std::size_t> typename Rows>
void compute_rows(const GemmArgs& args, std::size_t row, std::size_t block) {
  constexpr std::size_t kColumns = 2 * column_pairs(RowPairs);
  const std::int8_t* const right = args.right + block * args.groups * kGemmBytesPerGroup;
  for (std::size_t n = 0; n < kGemmColumnsPerBlock; n += kColumns) {
    const std::size_t column = block * kGemmColumnsPerBlock + n;
    if (column >= args.columns) return;
    compute_tile<RowPairs, Rows>(args, row, column, right + n * kGemmDepthPerGroup);
  }
}

// Computes the last rows of a block, at most TileRowPairs pairs.
template <std::size_t TileRowPairs, template <std::size_t> typename Rows>
void compute_last_rows(const GemmArgs& args, std::size_t row, std::size_t block) {
  if constexpr (TileRowPairs > 0) {
    if ((args.rows - row + 1) / 2 == TileRowPairs) return compute_rows<TileRowPairs, Rows>(args, row, block);
    compute_last_rows<TileRowPairs - 1, Rows>(args, row, block);
  }
}

template <std::size_t TileRowPairs, template <std::size_t> typename Rows>
void compute_block(const GemmArgs& args, std::size_t block) {
  std::size_t row = 0;
  for (; row + 2 * TileRowPairs <= args.rows; row += 2 * TileRowPairs) {
    compute_rows<TileRowPairs, Rows>(args, row, block);
  }
  compute_last_rows<TileRowPairs, Rows>(args, row, block);
}

}  // namespace

void pair_rows_neon_i8mm(const std::int8_t* values, std::size_t groups, std::size_t row_begin,
                         std::size_t row_end, std::int8_t* arranged) {
  const std::size_t depth = groups * kGemmDepthPerGroup;
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const std::int8_t* const source = values + row * depth;
    std::int8_t* target = arranged + row / 2 * 2 * paired_row_bytes(groups) + row % 2 * kPairDepth;
    std::size_t k = 0;
    for (; k + kPairDepth <= depth; k += kPairDepth, target += 2 * kPairDepth) {
      memcpy(target, source + k, kPairDepth);
    }
    if (k < depth) {
      memcpy(target, source + k, kGemmDepthPerGroup);
      memset(target + kGemmDepthPerGroup, 0, kGemmDepthPerGroup);
    }
  }
}

void gemm_f32_s8row_s8col_neon_i8mm(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  const auto compute = args.arranged != nullptr ? compute_block<kTileRowPairs, PairedRows>
                                                : compute_block<kLooseRowPairs, LooseRows>;
  for (std::size_t block = block_begin; block < block_end; ++block) compute(args, block);
}

}  // namespace chunkrt
