// Products of four int8 with AVX-512 VNNI, for kernels/attention/pair_products.h.
#pragma once

#include "kernels/attention/pair_products.h"

namespace chunkrt {
namespace {

// vpdpbusd takes the columns as its unsigned operand (x + 128, a flip of the top bit).
struct ByteQuads {
  using Operand = Ints;
  static constexpr std::size_t kRows = 6, kVectors = 4;  // 24 of 32 registers
  static constexpr bool kAreBytes = true;

  CHUNKRT_LANES static Operand load(const std::uint16_t* quads) {
    return {_mm512_xor_si512(_mm512_loadu_si512(quads), _mm512_set1_epi8(-128))};
  }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* quad) { return broadcast_word(quad); }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    return from_bits({_mm512_dpbusd_epi32(bits_of(sum).of, right.of, left.of)});
  }
  CHUNKRT_LANES static Ints total(Ints sums, std::int32_t row_sum) { return sums - all_ints(128 * row_sum); }
};

}  // namespace
}  // namespace chunkrt
