// shadow, portable: the reference implementation, which all others match bit for bit.
#include <algorithm>
#include <cmath>

#include "kernels/gemm/gemm.h"
#include "kernels/shadow/shadow.h"

namespace chunkrt {

void find_outliers_f32_f32_reference(const FindOutliersArgs& args, std::size_t block_begin,
                                     std::size_t block_end) {
  const OutlierLists& lists = args.lists;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    lists.block_counts[block] = 0;
    const std::size_t begin = block * kShadowChannelsPerBlock;
    for (std::size_t channel = begin; channel < std::min(begin + kShadowChannelsPerBlock, args.width);
         ++channel) {
      std::int32_t count = 0;
      for (std::size_t row = 0; row < args.num_rows; ++row) {
        const float x = args.input[row * args.width + channel];
        const float q = std::nearbyint(x / args.step);
        if (std::fabs(q) <= kShadowLevels) continue;
        const std::size_t place = channel * args.num_rows + static_cast<std::size_t>(count++);
        lists.rows[place] = static_cast<std::int32_t>(row);
        lists.remainders[place] = x - std::clamp(q, -kShadowLevels, kShadowLevels) * args.step;
      }
      lists.counts[channel] = count;
      lists.block_counts[block] += count;
    }
  }
}

void dequantize_row_f32_s8col_reference(const DequantizeRowArgs& args, std::size_t block_begin,
                                        std::size_t block_end) {
  const std::size_t begin = block_begin * kGemmColumnsPerBlock;
  for (std::size_t n = begin; n < std::min(block_end * kGemmColumnsPerBlock, args.columns); ++n) {
    const std::size_t group = n / kGemmColumnsPerBlock * args.groups + args.channel / kGemmDepthPerGroup;
    const std::int8_t* column =
        args.packed + group * kGemmBytesPerGroup + n % kGemmColumnsPerBlock * kGemmDepthPerGroup;
    args.out[n - begin] = static_cast<float>(column[args.channel % kGemmDepthPerGroup]) * args.scales[n];
  }
}

void add_outer_product_f32_f32_f32_reference(const AddOuterProductArgs& args) {
  for (std::size_t i = 0; i < args.count; ++i) {
    float* out = args.out + static_cast<std::size_t>(args.rows[i]) * args.out_stride;
    for (std::size_t n = 0; n < args.columns; ++n) out[n] += args.left[i] * args.right[n];
  }
}

}  // namespace chunkrt
