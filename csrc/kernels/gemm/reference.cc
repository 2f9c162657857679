// gemm, portable: the reference implementation, which all others match bit for bit.
#include "kernels/gemm/gemm.h"

namespace chunkrt {

void gemm_f32_s8row_s8col_reference(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::int8_t* right = args.right + block * args.groups * kGemmBytesPerGroup;
    for (std::size_t row = 0; row < args.rows; ++row) {
      const std::int8_t* left = args.left + row * args.groups * kGemmDepthPerGroup;
      std::int32_t sums[kGemmColumnsPerBlock] = {};
      for (std::size_t group = 0; group < args.groups; ++group) {
        for (std::size_t lane = 0; lane < kGemmBytesPerGroup; ++lane) {
          sums[lane / kGemmDepthPerGroup] += left[group * kGemmDepthPerGroup + lane % kGemmDepthPerGroup] *
                                             right[group * kGemmBytesPerGroup + lane];
        }
      }
      const std::size_t begin = block * kGemmColumnsPerBlock;
      for (std::size_t column = begin; column < args.columns && column < begin + kGemmColumnsPerBlock;
           ++column) {
        float value = static_cast<float>(sums[column - begin]);
        value = (value * args.left_scales[row]) * args.right_scales[column];
        if (args.bias != nullptr) value += args.bias[column];
        if (args.residual != nullptr) value += args.residual[row * args.residual_stride + column];
        args.out[row * args.out_stride + column] = value;
      }
    }
  }
}

}  // namespace chunkrt
