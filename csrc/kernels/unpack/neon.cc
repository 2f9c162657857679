// unpack with NEON, which can multiply bytes.
#include <arm_neon.h>

#include "kernels/unpack/unpack.h"

namespace chunkrt {

void unpack_s8col_u4block_neon(const UnpackArgs& args, std::size_t block_begin, std::size_t block_end) {
  constexpr std::size_t kRegisters = kUnpackGroupBytes / 16;
  const std::size_t depth_blocks = (args.groups + kUnpackGroups - 1) / kUnpackGroups;
  const std::uint8_t of_columns[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const uint8x16_t low_half = vdupq_n_u8(15), indices = vld1q_u8(of_columns);
  const int8x16_t zero = vdupq_n_s8(kUnpackZero);
  std::int8_t* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::uint8_t* packed = args.packed + block * depth_blocks * kUnpackBlockBytes;
    const std::uint8_t* multipliers = args.multipliers + block * depth_blocks * kUnpackColumns;
    int8x16_t factors[kRegisters] = {};
    const auto store = [&](uint8x16_t q, std::size_t i) {
      vst1q_s8(out + 16 * i, vmulq_s8(vsubq_s8(vreinterpretq_s8_u8(q), zero), factors[i]));
    };
    for (std::size_t group = 0; group < args.groups; group += 2, packed += kUnpackGroupBytes) {
      if (group % kUnpackGroups == 0) {
        const uint8x16_t bytes = vld1q_u8(multipliers);
        for (std::size_t i = 0; i < kRegisters; ++i) {
          const uint8x16_t places = vaddq_u8(indices, vdupq_n_u8(static_cast<std::uint8_t>(4 * i)));
          factors[i] = vreinterpretq_s8_u8(vqtbl1q_u8(bytes, places));
        }
        multipliers += kUnpackColumns;
      }
      for (std::size_t i = 0; i < kRegisters; ++i) store(vandq_u8(vld1q_u8(packed + 16 * i), low_half), i);
      out += kUnpackGroupBytes;
      if (group + 1 == args.groups) break;
      for (std::size_t i = 0; i < kRegisters; ++i) store(vshrq_n_u8(vld1q_u8(packed + 16 * i), 4), i);
      out += kUnpackGroupBytes;
    }
  }
}

}  // namespace chunkrt
