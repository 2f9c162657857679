// unpack with AVX2. AVX2 cannot multiply bytes, but a 16-bit multiplication computes two byte products,
// because q * multiplier is at most 15 * 16 = 240 and the lower byte does not carry. The contribution of the
// zero point of q is subtracted afterwards.
#include <immintrin.h>

#include "kernels/unpack/unpack.h"

namespace chunkrt {
namespace {

// Multipliers of the 8 columns of a register.
struct Multipliers {
  __m256i words;  // uint16: each column's multiplier twice
  __m256i zeros;  // uint8: 8 * the column's multiplier, four times
};

Multipliers spread(__m128i multipliers, __m256i indices) {
  const __m256i words = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(multipliers), indices);
  const __m256i zeros = _mm256_slli_epi16(words, 3);
  return {words, _mm256_or_si256(zeros, _mm256_slli_epi16(zeros, 8))};
}

void store(__m256i q, const Multipliers& multipliers, std::int8_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_sub_epi8(_mm256_mullo_epi16(q, multipliers.words), multipliers.zeros));
}

}  // namespace

void unpack_s8col_u4block_avx2(const UnpackArgs& args, std::size_t block_begin, std::size_t block_end) {
  const std::size_t depth_blocks = (args.groups + kUnpackGroups - 1) / kUnpackGroups;
  const __m256i low_half = _mm256_set1_epi8(15);
  const __m256i first = _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1,  //
                                         4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
  const __m256i second = _mm256_or_si256(first, _mm256_set1_epi16(8));
  std::int8_t* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::uint8_t* packed = args.packed + block * depth_blocks * kUnpackBlockBytes;
    const std::uint8_t* multipliers = args.multipliers + block * depth_blocks * kUnpackColumns;
    Multipliers factors[2] = {};
    for (std::size_t group = 0; group < args.groups; group += 2, packed += kUnpackGroupBytes) {
      if (group % kUnpackGroups == 0) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(multipliers));
        factors[0] = spread(bytes, first);
        factors[1] = spread(bytes, second);
        multipliers += kUnpackColumns;
      }
      const __m256i left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
      const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + 32));
      store(_mm256_and_si256(left, low_half), factors[0], out);
      store(_mm256_and_si256(right, low_half), factors[1], out + 32);
      out += kUnpackGroupBytes;
      if (group + 1 == args.groups) break;
      store(_mm256_and_si256(_mm256_srli_epi16(left, 4), low_half), factors[0], out);
      store(_mm256_and_si256(_mm256_srli_epi16(right, 4), low_half), factors[1], out + 32);
      out += kUnpackGroupBytes;
    }
  }
}

}  // namespace chunkrt
