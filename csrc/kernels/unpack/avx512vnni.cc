// unpack with AVX-512. As in avx2.cc, a 16-bit multiplication computes two byte products.
#include <immintrin.h>

#include "kernels/unpack/unpack.h"

namespace chunkrt {

void unpack_s8col_u4block_avx512vnni(const UnpackArgs& args, std::size_t block_begin, std::size_t block_end) {
  const std::size_t depth_blocks = (args.groups + kUnpackGroups - 1) / kUnpackGroups;
  const __m512i low_half = _mm512_set1_epi8(15);
  // Indices that select, in every 128 bits, four of 16 multipliers, each twice and widened to 16 bits.
  const __m512i indices =
      _mm512_add_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(0, -128, 0, -128, 1, -128, 1, -128, 2, -128, 2,
                                                           -128, 3, -128, 3, -128)),
                      _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                                       0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0));
  std::int8_t* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::uint8_t* packed = args.packed + block * depth_blocks * kUnpackBlockBytes;
    const std::uint8_t* multipliers = args.multipliers + block * depth_blocks * kUnpackColumns;
    __m512i words = _mm512_setzero_si512(), zeros = words;
    const auto store = [&](__m512i q) {
      _mm512_storeu_si512(out, _mm512_sub_epi8(_mm512_mullo_epi16(q, words), zeros));
      out += kUnpackGroupBytes;
    };
    for (std::size_t group = 0; group < args.groups; group += 2, packed += kUnpackGroupBytes) {
      if (group % kUnpackGroups == 0) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(multipliers));
        words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), indices);
        zeros = _mm512_slli_epi16(words, 3);
        zeros = _mm512_or_si512(zeros, _mm512_slli_epi16(zeros, 8));
        multipliers += kUnpackColumns;
      }
      const __m512i bytes = _mm512_loadu_si512(packed);
      store(_mm512_and_si512(bytes, low_half));
      if (group + 1 < args.groups) store(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half));
    }
  }
}

}  // namespace chunkrt
