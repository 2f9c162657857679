// The peak of AVX-512 in bfloat16: vdpbf16ps.
#include <immintrin.h>

#include "peaks.h"
#include "repeat.h"

namespace chunkrt::roofline {
namespace {

template <std::size_t Sums, bool Loads>
void bf16(std::size_t rounds) {
  repeat<Sums, Loads>(rounds, _mm512_set1_ps(1.0f), _mm512_set1_ps(0x1p-10f),
                      [](__m512 sum, __m512 left, __m512 right) {
                        return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
                      });
}

constexpr const char* kInstructions = "vdpbf16ps, 512 bits";

constexpr Peak kPeaks[] = {
    {"bfloat16", kInstructions, "12 sums, registers", 12 * 32, bf16<12, false>},
    {"bfloat16", kInstructions, "24 sums, registers", 24 * 32, bf16<24, false>},
    {"bfloat16", kInstructions, "24 sums, memory", 24 * 32, bf16<24, true>},
};

}  // namespace

const PeakTable kPeaksAvx512Bf16 = {"avx512bf16", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
