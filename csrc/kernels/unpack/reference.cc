// unpack, portable: the reference implementation, which all others match bit for bit.
#include "kernels/unpack/unpack.h"

namespace chunkrt {

void unpack_s8col_u4block_reference(const UnpackArgs& args, std::size_t block_begin, std::size_t block_end) {
  const std::size_t depth_blocks = (args.groups + kUnpackGroups - 1) / kUnpackGroups;
  std::int8_t* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    for (std::size_t group = 0; group < args.groups; ++group) {
      const std::size_t place = block * depth_blocks + group / kUnpackGroups;
      for (std::size_t n = 0; n < kUnpackColumns; ++n) {
        for (std::size_t k = 0; k < 4; ++k) {
          const int byte =
              args.packed[((place * 4 + group % kUnpackGroups / 2) * kUnpackColumns + n) * 4 + k];
          const int q = group % 2 == 0 ? byte & 15 : byte >> 4;
          *out++ = static_cast<std::int8_t>((q - kUnpackZero) * args.multipliers[place * kUnpackColumns + n]);
        }
      }
    }
  }
}

}  // namespace chunkrt
