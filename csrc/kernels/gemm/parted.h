// Rows split for sums in int16, as gemm with AVX2 reads them: the part that fits, and the excess, which is
// multiplied separately.
//
// vpmaddubsw adds two products of an unsigned and a signed byte in int16, with saturation; two such sums are
// added before they are widened. Weights are up to 255 then (w + 128), so that four products stay in int16 if
// of their four activations the positive ones add up to 128 at most, and the negative ones to -128 at least:
// 255 * 128 = 32640. The four are k = 8 i + {0, 1, 4, 5} or 8 i + {2, 3, 6, 7}. Where they do not fit, the
// first two are excess; so is the part of the other two beyond -64 .. 64 if those do not fit alone. Excess
// comes in groups of 4 k, of which 2 and 2 fit.
//
// If a row is quantised to int8 by its largest value, 3 fours in 100 have an excess. A row with very many,
// such as the low digits of 16 bits, is not split.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/gemm.h"

namespace chunkrt {

inline constexpr std::int32_t kNotParted = -1;
// int32 num_excess, or kNotParted, and then nothing follows
inline constexpr std::size_t kPartedHeaderBytes = 32;

struct GemmExcess {
  std::int32_t group;
  std::int32_t quad;  // four int8
};

// Bytes of the values that fit: a row of `left`, padded with zeros to complete vectors.
constexpr std::size_t parted_values_bytes(std::size_t groups) {
  return (groups * kGemmDepthPerGroup + 31) / 32 * 32;
}

// With more excess than this, the other method, which widens both sides, is faster.
constexpr std::size_t most_excess(std::size_t groups) { return groups / 2 + 4; }

// Bytes of a split row: the header, the values that fit, and GemmExcess [most_excess(groups)].
constexpr std::size_t parted_row_bytes(std::size_t groups) {
  return kPartedHeaderBytes + parted_values_bytes(groups) +
         (most_excess(groups) * sizeof(GemmExcess) + 31) / 32 * 32;
}

}  // namespace chunkrt
