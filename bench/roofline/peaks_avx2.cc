// Peaks of AVX2: int8 products through int16, and float32 products.
#include <immintrin.h>

#include "peaks.h"
#include "repeat.h"

namespace chunkrt::roofline {
namespace {

template <std::size_t Sums, bool Loads>
void u8s8(std::size_t rounds) {
  __m256i ones = _mm256_set1_epi16(1);
  hide(ones);
  repeat<Sums, Loads>(rounds, _mm256_set1_epi8(0x35), _mm256_set1_epi8(0x5a),
                      [ones](__m256i sum, __m256i left, __m256i right) {
                        const __m256i pairs = _mm256_maddubs_epi16(left, right);
                        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
                      });
}

// Two of these are added before they are widened, as in gemm.
template <std::size_t Sums, bool Loads>
void u8s8_by_twos(std::size_t rounds) {
  __m256i ones = _mm256_set1_epi16(1), other = _mm256_set1_epi8(0x21);
  hide(ones);
  hide(other);
  repeat<Sums, Loads>(rounds, _mm256_set1_epi8(0x35), _mm256_set1_epi8(0x1a),
                      [ones, other](__m256i sum, __m256i left, __m256i right) mutable {
                        hide(other);
                        const __m256i fours = _mm256_add_epi16(_mm256_maddubs_epi16(left, right),
                                                               _mm256_maddubs_epi16(other, right));
                        return _mm256_add_epi32(sum, _mm256_madd_epi16(fours, ones));
                      });
}

template <std::size_t Sums, bool Loads>
void s16(std::size_t rounds) {
  repeat<Sums, Loads>(rounds, _mm256_set1_epi8(0x35), _mm256_set1_epi8(0x5a),
                      [](__m256i sum, __m256i left, __m256i right) {
                        return _mm256_add_epi32(sum, _mm256_madd_epi16(left, right));
                      });
}

template <std::size_t Sums, bool Loads>
void u4s8(std::size_t rounds) {
  repeat<Sums, Loads>(rounds, _mm256_set1_epi8(0x05), _mm256_set1_epi8(0x5a),
                      [](__m256i sum, __m256i left, __m256i right) {
                        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(left, right));
                      });
}

template <std::size_t Sums, bool Loads>
void fma(std::size_t rounds) {
  repeat<Sums, Loads>(
      rounds, _mm256_set1_ps(1.0f), _mm256_set1_ps(0x1p-10f),
      [](__m256 sum, __m256 left, __m256 right) { return _mm256_fmadd_ps(left, right, sum); });
}

void read(const char* data, std::size_t bytes) {
  constexpr std::size_t kSums = 8;
  __m256i sums[kSums] = {};
  for (const char* end = data + bytes; data < end; data += kSums * sizeof(__m256i)) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kSums; ++i) {
      const auto* source = reinterpret_cast<const __m256i*>(data) + i;
      sums[i] = _mm256_xor_si256(sums[i], _mm256_load_si256(source));
    }
  }
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kSums; ++i) hide(sums[i]);
}

constexpr const char* kU8S8 = "vpmaddubsw + vpmaddwd + vpaddd, 256 bits";
constexpr const char* kTwos = "vpmaddubsw twice + vpaddw + vpmaddwd + vpaddd, 256 bits";
constexpr const char* kS16 = "vpmaddwd + vpaddd, 256 bits";
constexpr const char* kU4S8 = "vpmaddubsw + vpaddw, 256 bits";
constexpr const char* kFma = "vfmadd, 256 bits";

constexpr Peak kPeaks[] = {
    {"int8", kU8S8, "8 sums, registers", 8 * 32, u8s8<8, false>},
    {"int8", kU8S8, "12 sums, registers", 12 * 32, u8s8<12, false>},
    {"int8", kU8S8, "12 sums, memory", 12 * 32, u8s8<12, true>},
    {"int8", kTwos, "8 sums, registers", 8 * 64, u8s8_by_twos<8, false>},
    {"int8", kTwos, "8 sums, memory", 8 * 64, u8s8_by_twos<8, true>},
    {"int8", kS16, "8 sums, registers", 8 * 16, s16<8, false>},
    {"int8", kS16, "12 sums, registers", 12 * 16, s16<12, false>},
    {"int8", kS16, "12 sums, memory", 12 * 16, s16<12, true>},
    {"int4", kU4S8, "8 sums, registers", 8 * 32, u4s8<8, false>},
    {"int4", kU4S8, "12 sums, registers", 12 * 32, u4s8<12, false>},
    {"int4", kU4S8, "12 sums, memory", 12 * 32, u4s8<12, true>},
    {"float32", kFma, "10 sums, registers", 10 * 8, fma<10, false>},
    {"float32", kFma, "12 sums, registers", 12 * 8, fma<12, false>},
    {"float32", kFma, "12 sums, memory", 12 * 8, fma<12, true>},
};

}  // namespace

const PeakTable kPeaksAvx2 = {"avx2", kPeaks, sizeof(kPeaks) / sizeof(Peak), read};

}  // namespace chunkrt::roofline
