// Peaks of NEON's sdot: int8 products.
#include <arm_neon.h>

#include "peaks.h"
#include "repeat.h"

namespace chunkrt::roofline {
namespace {

template <std::size_t Sums, bool Loads>
void s8(std::size_t rounds) {
  repeat<Sums, Loads>(rounds, vdupq_n_s32(0x35353535), vdupq_n_s32(0x5a5a5a5a),
                      [](int32x4_t sum, int32x4_t left, int32x4_t right) {
                        return vdotq_s32(sum, vreinterpretq_s8_s32(left), vreinterpretq_s8_s32(right));
                      });
}

constexpr const char* kInstructions = "sdot, 128 bits";

constexpr Peak kPeaks[] = {
    {"int8", kInstructions, "16 sums, registers", 16 * 16, s8<16, false>},
    {"int8", kInstructions, "24 sums, registers", 24 * 16, s8<24, false>},
    {"int8", kInstructions, "24 sums, memory", 24 * 16, s8<24, true>},
};

}  // namespace

const PeakTable kPeaksNeonDotprod = {"neon_dotprod", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
