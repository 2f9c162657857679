// low_rank, portable: the reference implementation, which all others match bit for bit.
#include <algorithm>
#include <cmath>

#include "kernels/low_rank/low_rank.h"

namespace chunkrt {

void low_rank_down_f32_f32_reference(const LowRankDownArgs& args, std::size_t begin, std::size_t end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    for (std::size_t j = 0; j < kLowRankBlock; ++j) {
      float parts[kLowRankParts] = {};
      for (std::size_t part = begin; part < end; ++part) {
        const std::size_t last = low_rank_part(args.depth, part + 1);
        for (std::size_t k = low_rank_part(args.depth, part); k < last; ++k) {
          parts[part] = std::fma(args.left[row * args.depth + k], args.a[k * kLowRankBlock + j], parts[part]);
        }
      }
      float* out = args.out + row * args.out_stride + j;
      for (std::size_t part = begin; part < end && args.part_stride > 0; ++part) {
        out[part * args.part_stride] = parts[part];
      }
      if (args.part_stride == 0) *out = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
  }
}

void low_rank_up_f32_f32_reference(const LowRankUpArgs& args, std::size_t begin, std::size_t end) {
  for (std::size_t block = begin; block < end; ++block) {
    const auto [first_rank, num_ranks, first_row] = args.spans[block];
    const std::size_t column = block * kLowRankBlock;
    const std::size_t count = std::min(kLowRankBlock, args.columns - column);
    for (std::size_t row = 0; row < args.rows; ++row) {
      for (std::size_t n = 0; n < count; ++n) {
        float& out = args.out[row * args.columns + column + n];
        for (std::size_t j = 0; j < num_ranks; ++j) {
          out = std::fma(args.left[row * args.left_stride + first_rank + j],
                         args.b[(first_row + j) * kLowRankBlock + n], out);
        }
      }
    }
  }
}

}  // namespace chunkrt
