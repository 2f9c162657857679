// Peaks of AVX-VNNI: vpdpbusd of 256 bits.
#include <immintrin.h>

#include "peaks.h"
#include "repeat.h"

namespace chunkrt::roofline {
namespace {

template <std::size_t Sums, bool Loads>
void u8s8(std::size_t rounds) {
  repeat<Sums, Loads>(
      rounds, _mm256_set1_epi8(0x35), _mm256_set1_epi8(0x5a),
      [](__m256i sum, __m256i left, __m256i right) { return _mm256_dpbusd_avx_epi32(sum, left, right); });
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
