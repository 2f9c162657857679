// Stores to an int8 cache, in the layout of attention.h.
#include "kernels/attention/int8_cache.h"

#include <cstring>

#include "kernels/attention/attention.h"

namespace chunkrt {

void store_int8(const float* values, std::size_t head_dim, QuantizeFunction* quantize, std::byte* row,
                float* scratch) {
  const std::size_t num_groups = int8_groups(head_dim), num_whole = head_dim / kInt8Group;
  auto* const integers = reinterpret_cast<std::int8_t*>(scratch);
  float* const scales = scratch + (head_dim + 3) / 4;
  auto* const sums = reinterpret_cast<std::int32_t*>(scales + num_groups);  // discarded
  quantize({.input = values,
            .values = integers,
            .scales = scales,
            .sums = sums,
            .width = kInt8Group,
            .padded_width = kInt8Group},
           0, num_whole);
  if (const std::size_t begin = num_whole * kInt8Group; begin < head_dim) {
    quantize({.input = values + begin,
              .values = integers + begin,
              .scales = scales + num_whole,
              .sums = sums,
              .width = head_dim - begin,
              .padded_width = (head_dim - begin + 3) / 4 * 4},
             0, 1);
  }
  std::memcpy(row, integers, head_dim);
  std::memcpy(row + head_dim, scales, num_groups * sizeof(*scales));
}

}  // namespace chunkrt
