// Peaks of AVX-VNNI: vpdpbusd of 256 bits.
#include <immintrin.h>

#include "peaks.h"

namespace chunkrt::roofline {
namespace {

// See peaks_avx2.cc.
template <std::size_t Sums, bool Loads>
void u8s8(std::size_t rounds) {
  __m256i left = _mm256_set1_epi8(0x35), right = _mm256_set1_epi8(0x5a);
  __m256i memory[Sums];
  for (__m256i& one : memory) one = right;
  __m256i sums[Sums] = {};
  const __m256i* source = memory;
  for (; rounds > 0; --rounds) {
    asm volatile("" : "+r"(source) : : "memory");
#pragma GCC unroll 12
    for (std::size_t i = 0; i < Sums; ++i) {
      asm volatile("" : "+x"(left));
      sums[i] = _mm256_dpbusd_avx_epi32(sums[i], left, Loads ? source[i] : right);
    }
  }
#pragma GCC unroll 12
  for (std::size_t i = 0; i < Sums; ++i) asm volatile("" : "+x"(sums[i]));
}

constexpr const char* kInstructions = "vpdpbusd, 256 bits";

constexpr Peak kPeaks[] = {
    {"int8", kInstructions, "10 sums, registers", 10 * 32, u8s8<10, false>},
    {"int8", kInstructions, "12 sums, registers", 12 * 32, u8s8<12, false>},
    {"int8", kInstructions, "12 sums, memory", 12 * 32, u8s8<12, true>},
};

}  // namespace

const PeakTable kPeaksAvxVnni = {"avxvnni", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
