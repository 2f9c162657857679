// gemm with NEON's sdot: a register of packed weights holds 4 values along k of 4 columns, and a lane of
// activations holds 4 values along k of a row.
#include <arm_neon.h>
#include <string.h>

#include "kernels/gemm/gemm.h"
#include "kernels/store_neon.h"

namespace chunkrt {
namespace {

// The sums of 4 rows and the 16 columns of a block fill 16 of the 32 registers.
constexpr std::size_t kTileRows = 4;
constexpr std::size_t kVectors = kGemmColumnsPerBlock / 4;

template <std::size_t Rows, int Lane>
void add_group(int32x4_t (&sums)[Rows][kVectors], const int8x16_t (&left)[Rows], const std::int8_t* right) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    const int8x16_t weights = vld1q_s8(right + v * 16);
    for (std::size_t m = 0; m < Rows; ++m) sums[m][v] = vdotq_laneq_s32(sums[m][v], weights, left[m], Lane);
  }
}

template <std::size_t Rows>
void compute_tile(const GemmArgs& args, std::size_t row, std::size_t column, const std::int8_t* right) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  const std::int8_t* left = args.left + row * depth;
  int32x4_t sums[Rows][kVectors];
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t v = 0; v < kVectors; ++v) sums[m][v] = vdupq_n_s32(0);
  }
  int8x16_t activations[Rows];
  std::size_t group = 0;
  for (; group + 4 <= args.groups; group += 4, right += 4 * kGemmBytesPerGroup) {
    for (std::size_t m = 0; m < Rows; ++m) {
      activations[m] = vld1q_s8(left + m * depth + group * kGemmDepthPerGroup);
    }
    add_group<Rows, 0>(sums, activations, right);
    add_group<Rows, 1>(sums, activations, right + kGemmBytesPerGroup);
    add_group<Rows, 2>(sums, activations, right + 2 * kGemmBytesPerGroup);
    add_group<Rows, 3>(sums, activations, right + 3 * kGemmBytesPerGroup);
  }
  for (; group < args.groups; ++group, right += kGemmBytesPerGroup) {
    for (std::size_t m = 0; m < Rows; ++m) {
      std::int32_t quad;
      memcpy(&quad, left + m * depth + group * kGemmDepthPerGroup, sizeof(quad));
      activations[m] = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    }
    add_group<Rows, 0>(sums, activations, right);
  }
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t v = 0; v < kVectors; ++v)
      store_columns(args, row + m, column + v * 4, vcvtq_f32_s32(sums[m][v]), args.right_scales);
  }
}

}  // namespace

void gemm_f32_s8row_s8col_neon_dotprod(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::int8_t* right = args.right + block * args.groups * kGemmBytesPerGroup;
    const std::size_t column = block * kGemmColumnsPerBlock;
    std::size_t row = 0;
    for (; row + kTileRows <= args.rows; row += kTileRows) {
      compute_tile<kTileRows>(args, row, column, right);
    }
    switch (args.rows - row) {
      case 1:
        compute_tile<1>(args, row, column, right);
        break;
      case 2:
        compute_tile<2>(args, row, column, right);
        break;
      case 3:
        compute_tile<3>(args, row, column, right);
        break;
      default:
        break;
    }
  }
}

}  // namespace chunkrt
