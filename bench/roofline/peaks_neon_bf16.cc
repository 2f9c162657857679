// Peaks of NEON in bfloat16: bfmmla and bfdot.
#include <arm_neon.h>

#include "peaks.h"
#include "repeat.h"

namespace chunkrt::roofline {
namespace {

template <std::size_t Sums, bool Loads>
void matrices(std::size_t rounds) {
  repeat<Sums, Loads>(rounds, vdupq_n_f32(1.0f), vdupq_n_f32(0x1p-10f),
                      [](float32x4_t sum, float32x4_t left, float32x4_t right) {
                        return vbfmmlaq_f32(sum, vreinterpretq_bf16_f32(left), vreinterpretq_bf16_f32(right));
                      });
}

template <std::size_t Sums, bool Loads>
void dots(std::size_t rounds) {
  repeat<Sums, Loads>(rounds, vdupq_n_f32(1.0f), vdupq_n_f32(0x1p-10f),
                      [](float32x4_t sum, float32x4_t left, float32x4_t right) {
                        return vbfdotq_f32(sum, vreinterpretq_bf16_f32(left), vreinterpretq_bf16_f32(right));
                      });
}

constexpr Peak kPeaks[] = {
    {"bfloat16", "bfdot, 128 bits", "24 sums, registers", 24 * 8, dots<24, false>},
    {"bfloat16", "bfmmla, 128 bits", "16 sums, registers", 16 * 16, matrices<16, false>},
    {"bfloat16", "bfmmla, 128 bits", "24 sums, registers", 24 * 16, matrices<24, false>},
    {"bfloat16", "bfmmla, 128 bits", "24 sums, memory", 24 * 16, matrices<24, true>},
};

}  // namespace

const PeakTable kPeaksNeonBf16 = {"neon_bf16", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
