// Peaks of AVX-512 with VNNI: int8 products, and float32 products.
#include <immintrin.h>

#include "peaks.h"
#include "repeat.h"

namespace chunkrt::roofline {
namespace {

template <std::size_t Sums, bool Loads>
void u8s8(std::size_t rounds) {
  repeat<Sums, Loads>(
      rounds, _mm512_set1_epi8(0x35), _mm512_set1_epi8(0x5a),
      [](__m512i sum, __m512i left, __m512i right) { return _mm512_dpbusd_epi32(sum, left, right); });
}

template <std::size_t Sums, bool Loads>
void fma(std::size_t rounds) {
  repeat<Sums, Loads>(
      rounds, _mm512_set1_ps(1.0f), _mm512_set1_ps(0x1p-10f),
      [](__m512 sum, __m512 left, __m512 right) { return _mm512_fmadd_ps(left, right, sum); });
}

void read(const char* data, std::size_t bytes) {
  constexpr std::size_t kSums = 8;
  __m512i sums[kSums] = {};
  for (const char* end = data + bytes; data < end; data += kSums * sizeof(__m512i)) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kSums; ++i) {
      sums[i] = _mm512_xor_si512(sums[i], _mm512_load_si512(data + i * sizeof(__m512i)));
    }
  }
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kSums; ++i) hide(sums[i]);
}

constexpr const char* kU8S8 = "vpdpbusd, 512 bits";
constexpr const char* kFma = "vfmadd, 512 bits";

constexpr Peak kPeaks[] = {
    {"int8", kU8S8, "12 sums, registers", 12 * 64, u8s8<12, false>},
    {"int8", kU8S8, "24 sums, registers", 24 * 64, u8s8<24, false>},
    {"int8", kU8S8, "24 sums, memory", 24 * 64, u8s8<24, true>},
    {"float32", kFma, "12 sums, registers", 12 * 16, fma<12, false>},
    {"float32", kFma, "24 sums, registers", 24 * 16, fma<24, false>},
    {"float32", kFma, "24 sums, memory", 24 * 16, fma<24, true>},
};

}  // namespace

const PeakTable kPeaksAvx512Vnni = {"avx512vnni", kPeaks, sizeof(kPeaks) / sizeof(Peak), read};

}  // namespace chunkrt::roofline
