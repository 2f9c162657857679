// Rows that are split for sums in int16, in the layout that gemm with AVX2 reads: the part that fits, and the
// excess, which is multiplied separately.
//
// vpmaddubsw adds two products of an unsigned and a signed byte in int16, with saturation; two such sums are
// added before they are widened. The unsigned weights (w + 128) are at most 255. So the sum of four products
// fits in int16 if the positive ones of their four activations add up to at most 128, and the negative ones
// to at least -128: 255 * 128 = 32640. The four activations are k = 8 i + {0, 1, 4, 5} or 8 i + {2, 3, 6, 7}.
// If four activations do not fit, the first two are excess. If the other two do not fit alone, the parts of
// them that exceed -64 .. 64 are excess, too. Excess is stored in groups of 4 values along k, of which each
// pair fits.
//
// If a row is quantised to int8 by its largest value, 3 % of the groups of four have an excess. A row with a
// large excess, such as the low digits of 16-bit values, is not split.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/gemm.h"

namespace chunkrt {

inline constexpr std::int32_t kNotParted = -1;
// int32: num_excess, or kNotParted if nothing follows
inline constexpr std::size_t kPartedHeaderBytes = 32;

struct GemmExcess {
  std::int32_t group;
  std::int32_t quad;  // four int8
};

// Number of bytes of the values that fit: a row of `left`, padded with zeros to complete vectors.
constexpr std::size_t parted_values_bytes(std::size_t groups) {
  return (groups * kGemmDepthPerGroup + 31) / 32 * 32;
}

// Largest number of excess groups; with more, the method that widens both operands is faster.
constexpr std::size_t most_excess(std::size_t groups) { return groups / 2 + 4; }

// Number of bytes of a split row: the header, the values that fit, and GemmExcess [most_excess(groups)].
constexpr std::size_t parted_row_bytes(std::size_t groups) {
  return kPartedHeaderBytes + parted_values_bytes(groups) +
         (most_excess(groups) * sizeof(GemmExcess) + 31) / 32 * 32;
}

}  // namespace chunkrt
