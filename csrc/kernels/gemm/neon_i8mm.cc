// gemm with NEON's smmla: 8 k of 2 rows times 8 k of 2 columns into a 2 x 2 tile of sums.
//
// The packed weights keep 4 k of a column together, so the 8 k of two columns come from two neighbouring
// k-groups by one zip. An odd last row is computed twice, an odd last group against zeros.
#include <arm_neon.h>
#include <string.h>

#include "kernels/gemm/gemm.h"
#include "kernels/store_neon.h"

namespace chunkrt {
namespace {

// 4 pairs of rows by 4 pairs of columns fill 16 of the 32 registers with sums.
constexpr std::size_t kTileRowPairs = 4;
constexpr std::size_t kTileColumns = 8;
constexpr std::size_t kColumnPairs = kTileColumns / 2;

// Pairs of columns, 8 k each, of four columns in two neighbouring groups.
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

template <std::size_t RowPairs>
void add_groups(int32x4_t (&sums)[RowPairs][kColumnPairs], const int8x16_t (&left)[RowPairs],
                const int8x16_t (&right)[kColumnPairs]) {
  for (std::size_t c = 0; c < kColumnPairs; ++c) {
    for (std::size_t m = 0; m < RowPairs; ++m) sums[m][c] = vmmlaq_s32(sums[m][c], left[m], right[c]);
  }
}

template <std::size_t RowPairs>
void compute_tile(const GemmArgs& args, std::size_t row, std::size_t column, const std::int8_t* right) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  const std::int8_t *first_rows[RowPairs], *second_rows[RowPairs];
  int32x4_t sums[RowPairs][kColumnPairs];
  for (std::size_t m = 0; m < RowPairs; ++m) {
    const std::size_t first = row + 2 * m, second = first + 1 < args.rows ? first + 1 : first;
    first_rows[m] = args.left + first * depth;
    second_rows[m] = args.left + second * depth;
    for (std::size_t c = 0; c < kColumnPairs; ++c) sums[m][c] = vdupq_n_s32(0);
  }
  int8x16_t activations[RowPairs], weights[kColumnPairs];
  std::size_t group = 0;
  for (; group + 2 <= args.groups; group += 2, right += 2 * kGemmBytesPerGroup) {
    for (std::size_t c = 0; c < kColumnPairs; c += 2) {
      zip_groups(vld1q_s8(right + c * 8), vld1q_s8(right + kGemmBytesPerGroup + c * 8), weights + c);
    }
    for (std::size_t m = 0; m < RowPairs; ++m) {
      activations[m] = vcombine_s8(vld1_s8(first_rows[m] + group * kGemmDepthPerGroup),
                                   vld1_s8(second_rows[m] + group * kGemmDepthPerGroup));
    }
    add_groups<RowPairs>(sums, activations, weights);
  }
  if (group < args.groups) {
    for (std::size_t c = 0; c < kColumnPairs; c += 2) {
      zip_groups(vld1q_s8(right + c * 8), vdupq_n_s8(0), weights + c);
    }
    for (std::size_t m = 0; m < RowPairs; ++m) {
      activations[m] = vcombine_s8(load_last_group(first_rows[m] + group * kGemmDepthPerGroup),
                                   load_last_group(second_rows[m] + group * kGemmDepthPerGroup));
    }
    add_groups<RowPairs>(sums, activations, weights);
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

void compute_columns(const GemmArgs& args, std::size_t column, const std::int8_t* right) {
  std::size_t row = 0;
  for (; row + 2 * kTileRowPairs <= args.rows; row += 2 * kTileRowPairs) {
    compute_tile<kTileRowPairs>(args, row, column, right);
  }
  switch ((args.rows - row + 1) / 2) {
    case 1:
      return compute_tile<1>(args, row, column, right);
    case 2:
      return compute_tile<2>(args, row, column, right);
    case 3:
      return compute_tile<3>(args, row, column, right);
    case 4:
      return compute_tile<4>(args, row, column, right);
    default:
      return;
  }
}

}  // namespace

void gemm_f32_s8row_s8col_neon_i8mm(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::int8_t* right = args.right + block * args.groups * kGemmBytesPerGroup;
    const std::size_t column = block * kGemmColumnsPerBlock;
    compute_columns(args, column, right);
    if (column + kTileColumns < args.columns) {
      compute_columns(args, column + kTileColumns, right + kTileColumns * kGemmDepthPerGroup);
    }
  }
}

}  // namespace chunkrt
