// Peaks of NEON: float32 products.
#include <arm_neon.h>

#include "peaks.h"
#include "repeat.h"

namespace chunkrt::roofline {
namespace {

template <std::size_t Sums, bool Loads>
void fma(std::size_t rounds) {
  repeat<Sums, Loads>(
      rounds, vdupq_n_f32(1.0f), vdupq_n_f32(0x1p-10f),
      [](float32x4_t sum, float32x4_t left, float32x4_t right) { return vfmaq_f32(sum, left, right); });
}

void read(const char* data, std::size_t bytes) {
  constexpr std::size_t kSums = 16;
  uint8x16_t sums[kSums] = {};
  for (const char* end = data + bytes; data < end; data += kSums * sizeof(uint8x16_t)) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kSums; ++i) {
      const auto* source = reinterpret_cast<const uint8_t*>(data) + i * sizeof(uint8x16_t);
      sums[i] = veorq_u8(sums[i], vld1q_u8(source));
    }
  }
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kSums; ++i) hide(sums[i]);
}

constexpr const char* kInstructions = "fmla, 128 bits";

constexpr Peak kPeaks[] = {
    {"float32", kInstructions, "16 sums, registers", 16 * 4, fma<16, false>},
    {"float32", kInstructions, "24 sums, registers", 24 * 4, fma<24, false>},
    {"float32", kInstructions, "24 sums, memory", 24 * 4, fma<24, true>},
};

}  // namespace

const PeakTable kPeaksNeon = {"neon", kPeaks, sizeof(kPeaks) / sizeof(Peak), read};

}  // namespace chunkrt::roofline
