// block_gemm with NEON's sdot: a register of packed weights holds 8 values along k of 4 columns, four in the
// low halves of its bytes and four in the high halves. A lane of activations holds 4 values along k of a row.
#include <arm_neon.h>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/store_neon.h"

namespace chunkrt {
namespace {

// A tile holds up to 8 registers of 4 columns of a row, where each register is stored as integer sums and as
// floats; so a tile with more rows has fewer columns.
constexpr std::size_t kTileRows = 4;
constexpr std::size_t kVectors = kBlockColumns / 4;
constexpr std::size_t kGroupDepth = 8;
constexpr std::size_t kGroupBytes = kGroupDepth * kBlockColumns / 2;

constexpr std::size_t vectors_beside(std::size_t rows) { return rows <= 2 ? kVectors : 2; }

float32x4_t load_halves(const std::uint16_t* source) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source)));
}

// Adds the products of 8 values along k; the activations hold four in `Lane` and four in the next lane.
template <int Lane, std::size_t Rows, std::size_t Vectors>
void add_group(int32x4_t (&sums)[Rows][Vectors], const int8x16_t (&left)[Rows], const std::uint8_t* right) {
  for (std::size_t v = 0; v < Vectors; ++v) {
    const uint8x16_t packed = vld1q_u8(right + v * 16);
    const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15)));
    const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
    for (std::size_t m = 0; m < Rows; ++m) {
      sums[m][v] = vdotq_laneq_s32(sums[m][v], low, left[m], Lane);
      sums[m][v] = vdotq_laneq_s32(sums[m][v], high, left[m], Lane + 1);
    }
  }
}

// Computes the rows from `row` on and, of the 16 columns of `block`, 4 * Vectors columns from `first` on.
template <std::size_t Rows, std::size_t Vectors>
void compute_tile(const BlockGemmArgs& args, std::size_t row, std::size_t block, std::size_t first) {
  const std::size_t depth = args.depth_blocks * kBlockDepth;
  const std::int8_t* left = args.left + row * depth;
  const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
  const std::uint8_t* right = args.right + block * args.depth_blocks * kBlockBytes + first * 4;
  const std::uint16_t* scales = args.right_scales + block * args.depth_blocks * 2 * kBlockColumns + first;
  float32x4_t values[Rows][Vectors];
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t v = 0; v < Vectors; ++v) values[m][v] = vdupq_n_f32(0.0f);
  }
  for (std::size_t b = 0; b < args.depth_blocks; ++b) {
    int32x4_t sums[Rows][Vectors];
    int8x16_t activations[Rows];
    for (std::size_t m = 0; m < Rows; ++m) {
      for (std::size_t v = 0; v < Vectors; ++v) sums[m][v] = vdupq_n_s32(0);
    }
    for (std::size_t m = 0; m < Rows; ++m) activations[m] = vld1q_s8(left + m * depth);
    add_group<0>(sums, activations, right);
    add_group<2>(sums, activations, right + kGroupBytes);
    for (std::size_t m = 0; m < Rows; ++m) activations[m] = vld1q_s8(left + m * depth + 16);
    add_group<0>(sums, activations, right + 2 * kGroupBytes);
    add_group<2>(sums, activations, right + 3 * kGroupBytes);
    for (std::size_t v = 0; v < Vectors; ++v) {
      const float32x4_t scale = load_halves(scales + v * 4);
      const float32x4_t minimum = load_halves(scales + kBlockColumns + v * 4);
      for (std::size_t m = 0; m < Rows; ++m) {
        const auto left_sum = static_cast<float>(left_sums[m * args.depth_blocks + b]);
        values[m][v] = vfmaq_f32(values[m][v], vcvtq_f32_s32(sums[m][v]), scale);
        values[m][v] = vfmaq_n_f32(values[m][v], minimum, left_sum);
      }
    }
    left += kBlockDepth;
    right += kBlockBytes;
    scales += 2 * kBlockColumns;
  }
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t v = 0; v < Vectors; ++v) {
      store_columns(args, row + m, block * kBlockColumns + first + v * 4, values[m][v], nullptr);
    }
  }
}

template <std::size_t Rows>
void compute_rows(const BlockGemmArgs& args, std::size_t row, std::size_t block) {
  constexpr std::size_t kTileVectors = vectors_beside(Rows);
  for (std::size_t first = 0; first < kBlockColumns; first += kTileVectors * 4) {
    if (block * kBlockColumns + first >= args.columns) return;
    compute_tile<Rows, kTileVectors>(args, row, block, first);
  }
}

}  // namespace

void block_gemm_f32_s8row_u4block_neon_dotprod(const BlockGemmArgs& args, std::size_t block_begin,
                                               std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    std::size_t row = 0;
    for (; row + kTileRows <= args.rows; row += kTileRows) compute_rows<kTileRows>(args, row, block);
    switch (args.rows - row) {
      case 1:
        compute_rows<1>(args, row, block);
        break;
      case 2:
        compute_rows<2>(args, row, block);
        break;
      case 3:
        compute_rows<3>(args, row, block);
        break;
      default:
        break;
    }
  }
}

}  // namespace chunkrt
