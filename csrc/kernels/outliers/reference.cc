// outliers, portable: the reference implementation, which all others match bit for bit.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/list.h"
#include "kernels/outliers/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kSums = 64;

float sum_of_magnitudes(const float* input, std::size_t width) {
  std::array<float, kSums> sums = {};
  for (std::size_t k = 0; k < width; ++k) sums[k % kSums] += std::fabs(input[k]);
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace

void take_outliers_f32_f32_reference(const TakeOutliersArgs& args, std::size_t row_begin,
                                     std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) {
    const float* input = args.input + row * args.width;
    float* rest = args.rest + row * args.width;
    const float limit = kOutlierRatio * sum_of_magnitudes(input, args.width) / static_cast<float>(args.width);
    std::copy(input, input + args.width, rest);
    args.outliers.counts[row] = 0;
    for (std::size_t k = 0; k < args.width; ++k) {
      if (std::fabs(input[k]) > limit) take_one(args, row, k);
    }
  }
}

void add_outliers_f32_s8col_reference(const AddOutliersArgs& args, std::size_t block_begin,
                                      std::size_t block_end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
    const float* values = args.outliers.values + row * args.outliers.capacity;
    const std::size_t end = std::min(block_end * kGemmColumnsPerBlock, args.columns);
    if (args.outliers.counts[row] == 0) continue;
    for (std::size_t n = block_begin * kGemmColumnsPerBlock; n < end; ++n) {
      float sum = 0.0f;
      for (std::int32_t i = 0; i < args.outliers.counts[row]; ++i) {
        const std::size_t k = static_cast<std::size_t>(channels[i]);
        const std::size_t group = n / kGemmColumnsPerBlock * args.groups + k / kGemmDepthPerGroup;
        const std::int8_t* column =
            args.packed + group * kGemmBytesPerGroup + n % kGemmColumnsPerBlock * kGemmDepthPerGroup;
        sum = std::fma(values[i], static_cast<float>(column[k % kGemmDepthPerGroup]), sum);
      }
      float& out = args.out[row * args.columns + n];
      out = std::fma(sum, args.scales[n], out);
    }
  }
}

void add_outliers_f32_u4block_reference(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                        std::size_t block_end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
    const float* values = args.outliers.values + row * args.outliers.capacity;
    const std::size_t end = std::min(block_end * kBlockColumns, args.columns);
    if (args.outliers.counts[row] == 0) continue;
    for (std::size_t n = block_begin * kBlockColumns; n < end; ++n) {
      float sum = 0.0f;
      for (std::int32_t i = 0; i < args.outliers.counts[row]; ++i) {
        const std::size_t k = static_cast<std::size_t>(channels[i]), column = n % kBlockColumns;
        const std::size_t depth_block = n / kBlockColumns * args.depth_blocks + k / kBlockDepth;
        const std::uint8_t both = args.right[depth_block * kBlockBytes +
                                             (k % kBlockDepth / 8 * kBlockColumns + column) * 4 + k % 4];
        const float q = static_cast<float>(k % 8 < 4 ? both & 15 : both >> 4);
        const std::uint16_t* scales = args.right_scales + depth_block * 2 * kBlockColumns;
        float scale = 0.0f, minimum = 0.0f;
        widen_f32_f16_reference(scales + column, &scale, 1);
        widen_f32_f16_reference(scales + kBlockColumns + column, &minimum, 1);
        sum = std::fma(values[i], std::fma(q, scale, minimum), sum);
      }
      args.out[row * args.columns + n] += sum;
    }
  }
}

}  // namespace chunkrt
