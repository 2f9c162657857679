// float_linear with NEON.
#include "kernels/float_linear/loops.h"

namespace chunkrt {

void float_linear_f32_f32_neon(const FloatLinearArgs& args, std::size_t begin, std::size_t end) {
  multiply_items(args, begin, end);
}

}  // namespace chunkrt
