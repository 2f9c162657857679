// block_gemm, portable: the reference implementation, which all others match bit for bit.
#include <cmath>

#include "kernels/list.h"

namespace chunkrt {
namespace {

// Adds the contribution of one block to the values of one row and 16 columns.
void add_block(const std::int8_t* left, std::int32_t left_sum, const std::uint8_t* right,
               const std::uint16_t* right_scales, float* values) {
  std::int32_t sums[kBlockColumns] = {};
  for (std::size_t i = 0; i < kBlockBytes; ++i) {
    const std::size_t k = i / 64 * 8 + i % 4, column = i % 64 / 4;
    sums[column] += left[k] * (right[i] & 15) + left[k + 4] * (right[i] >> 4);
  }
  float scales[2 * kBlockColumns];
  widen_f32_f16_reference(right_scales, scales, 2 * kBlockColumns);
  const float* minima = scales + kBlockColumns;
  for (std::size_t i = 0; i < kBlockColumns; ++i) {
    values[i] = std::fma(static_cast<float>(sums[i]), scales[i], values[i]);
    values[i] = std::fma(static_cast<float>(left_sum), minima[i], values[i]);
  }
}

}  // namespace

void block_gemm_f32_s8row_u4block_reference(const BlockGemmArgs& args, std::size_t block_begin,
                                            std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::uint8_t* right = args.right + block * args.depth_blocks * kBlockBytes;
    const std::uint16_t* right_scales = args.right_scales + block * args.depth_blocks * 2 * kBlockColumns;
    for (std::size_t row = 0; row < args.rows; ++row) {
      const std::int8_t* left = args.left + row * args.depth_blocks * kBlockDepth;
      const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
      float values[kBlockColumns] = {};
      for (std::size_t b = 0; b < args.depth_blocks; ++b) {
        add_block(left + b * kBlockDepth, left_sums[b], right + b * kBlockBytes,
                  right_scales + b * 2 * kBlockColumns, values);
      }
      const std::size_t begin = block * kBlockColumns;
      for (std::size_t column = begin; column < args.columns && column < begin + kBlockColumns; ++column) {
        float value = values[column - begin] * args.left_scales[row];
        if (args.bias != nullptr) value += args.bias[column];
        if (args.residual != nullptr) value += args.residual[row * args.residual_stride + column];
        args.out[row * args.out_stride + column] = value;
      }
    }
  }
}

}  // namespace chunkrt
