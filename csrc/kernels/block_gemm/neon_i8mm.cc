// block_gemm with NEON's smmla, which multiplies 2 rows by 2 columns over 8 values along k, into a 2 x 2
// square of sums.
//
// A register of packed weights holds 8 values along k of 4 columns, four in the low halves of its bytes and
// four in the high halves; one zip of the halves joins the 8 values of 2 columns. Rows are stored in pairs,
// in the layout of arranged.h.
#include <arm_neon.h>
#include <string.h>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/gemm/arranged.h"
#include "kernels/store_neon.h"

namespace chunkrt {
namespace {

// Each square takes a register of integer sums and a register of floats, so 12 squares fill 24 of the 32
// registers. A tile with more rows has fewer columns.
constexpr std::size_t kTileRowPairs = 6;
constexpr std::size_t kGroupDepth = 8;
constexpr std::size_t kGroupBytes = kGroupDepth * kBlockColumns / 2;
constexpr std::size_t kPairBytes = 2 * kGroupDepth;
constexpr std::size_t kPairedBlockBytes = 2 * (kBlockDepth + 2 * sizeof(float));

constexpr std::size_t column_pairs_beside(std::size_t row_pairs) {
  return row_pairs == 1 ? 8 : row_pairs == 2 ? 4 : 2;
}

// Two pairs of columns with 8 values along k each.
void unpack(const std::uint8_t* packed_columns, int8x16_t* pairs) {
  const uint8x16_t packed = vld1q_u8(packed_columns);
  const uint32x4_t low = vreinterpretq_u32_u8(vandq_u8(packed, vdupq_n_u8(15)));
  const uint32x4_t high = vreinterpretq_u32_u8(vshrq_n_u8(packed, 4));
  pairs[0] = vreinterpretq_s8_u32(vzip1q_u32(low, high));
  pairs[1] = vreinterpretq_s8_u32(vzip2q_u32(low, high));
}

// Widens two pairs of float16, each pair twice, to match the squares of two pairs of columns.
void load_halves_twice(const std::uint16_t* source, float32x4_t* pairs) {
  const float32x4_t values = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source)));
  pairs[0] = vcombine_f32(vget_low_f32(values), vget_low_f32(values));
  pairs[1] = vcombine_f32(vget_high_f32(values), vget_high_f32(values));
}

// Computes RowPairs pairs of rows from `row` on and, of the 16 columns of `block`, 2 * ColumnPairs columns
// from `first` on.
template <std::size_t RowPairs, std::size_t ColumnPairs>
void compute_tile(const BlockGemmArgs& args, std::size_t row, std::size_t block, std::size_t first) {
  const std::size_t pair_bytes = args.depth_blocks * kPairedBlockBytes;
  const std::int8_t* left = args.arranged + row / 2 * pair_bytes;
  const std::uint8_t* right = args.right + block * args.depth_blocks * kBlockBytes + first * 4;
  const std::uint16_t* scales = args.right_scales + block * args.depth_blocks * 2 * kBlockColumns + first;
  float32x4_t values[RowPairs][ColumnPairs];
  for (std::size_t m = 0; m < RowPairs; ++m) {
    for (std::size_t c = 0; c < ColumnPairs; ++c) values[m][c] = vdupq_n_f32(0.0f);
  }
  for (std::size_t b = 0; b < args.depth_blocks; ++b, left += kPairedBlockBytes) {
    int32x4_t sums[RowPairs][ColumnPairs];
    for (std::size_t m = 0; m < RowPairs; ++m) {
      for (std::size_t c = 0; c < ColumnPairs; ++c) sums[m][c] = vdupq_n_s32(0);
    }
    for (std::size_t k = 0; k < kBlockDepth; k += kGroupDepth, right += kGroupBytes) {
      int8x16_t weights[ColumnPairs];
      for (std::size_t c = 0; c < ColumnPairs; c += 2) unpack(right + c * 8, weights + c);
      for (std::size_t m = 0; m < RowPairs; ++m) {
        const int8x16_t activations = vld1q_s8(left + m * pair_bytes + k / kGroupDepth * kPairBytes);
        for (std::size_t c = 0; c < ColumnPairs; ++c) {
          sums[m][c] = vmmlaq_s32(sums[m][c], activations, weights[c]);
        }
      }
    }
    for (std::size_t c = 0; c < ColumnPairs; c += 2) {
      float32x4_t scale[2], minimum[2];
      load_halves_twice(scales + c * 2, scale);
      load_halves_twice(scales + kBlockColumns + c * 2, minimum);
      for (std::size_t m = 0; m < RowPairs; ++m) {
        const float32x4_t left_sums = vreinterpretq_f32_s8(vld1q_s8(left + m * pair_bytes + 2 * kBlockDepth));
        for (std::size_t i = 0; i < 2; ++i) {
          float32x4_t& value = values[m][c + i];
          value = vfmaq_f32(value, vcvtq_f32_s32(sums[m][c + i]), scale[i]);
          value = vfmaq_f32(value, left_sums, minimum[i]);
        }
      }
    }
    scales += 2 * kBlockColumns;
  }
  for (std::size_t m = 0; m < RowPairs; ++m) {
    for (std::size_t c = 0; c < ColumnPairs; c += 2) {
      const float32x4_t low = values[m][c], high = values[m][c + 1];
      const std::size_t column = block * kBlockColumns + first + c * 2, row_of_pair = row + 2 * m;
      store_columns(args, row_of_pair, column, vcombine_f32(vget_low_f32(low), vget_low_f32(high)), nullptr);
      if (row_of_pair + 1 == args.rows) continue;
      store_columns(args, row_of_pair + 1, column, vcombine_f32(vget_high_f32(low), vget_high_f32(high)),
                    nullptr);
    }
  }
}

template <std::size_t RowPairs>
void compute_rows(const BlockGemmArgs& args, std::size_t row, std::size_t block) {
  constexpr std::size_t kColumnPairs = column_pairs_beside(RowPairs);
  for (std::size_t first = 0; first < kBlockColumns; first += kColumnPairs * 2) {
    if (block * kBlockColumns + first >= args.columns) return;
    compute_tile<RowPairs, kColumnPairs>(args, row, block, first);
  }
}

// Computes the last rows, in RowPairs pairs or fewer.
template <std::size_t RowPairs>
void compute_last_rows(const BlockGemmArgs& args, std::size_t row, std::size_t block) {
  if constexpr (RowPairs > 0) {
    if ((args.rows - row + 1) / 2 == RowPairs) return compute_rows<RowPairs>(args, row, block);
    compute_last_rows<RowPairs - 1>(args, row, block);
  }
}

}  // namespace

void pair_block_rows_neon_i8mm(const std::int8_t* values, std::size_t groups, std::size_t row_begin,
                               std::size_t row_end, std::int8_t* arranged) {
  const std::size_t depth = groups * 4;
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const std::int8_t* source = values + row * depth;
    std::int8_t* target = arranged + row / 2 * 2 * paired_block_row_bytes(groups);
    for (std::size_t b = 0; b < depth / kBlockDepth; ++b, target += kPairedBlockBytes) {
      std::int32_t sum = 0;
      for (std::size_t k = 0; k < kBlockDepth; ++k) sum += source[k];
      for (std::size_t k = 0; k < kBlockDepth; k += kGroupDepth, source += kGroupDepth) {
        memcpy(target + 2 * k + row % 2 * kGroupDepth, source, kGroupDepth);
      }
      const float twice[2] = {static_cast<float>(sum), static_cast<float>(sum)};
      memcpy(target + 2 * kBlockDepth + row % 2 * sizeof(twice), twice, sizeof(twice));
    }
  }
}

void block_gemm_f32_s8row_u4block_neon_i8mm(const BlockGemmArgs& args, std::size_t block_begin,
                                            std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    std::size_t row = 0;
    for (; row + 2 * kTileRowPairs <= args.rows; row += 2 * kTileRowPairs) {
      compute_rows<kTileRowPairs>(args, row, block);
    }
    compute_last_rows<kTileRowPairs>(args, row, block);
  }
}

}  // namespace chunkrt
