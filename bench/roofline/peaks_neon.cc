// Peaks of NEON: float32 products.
#include <arm_neon.h>

#include "peaks.h"

namespace chunkrt::roofline {
namespace {

// See peaks_avx2.cc.
template <std::size_t Sums, bool Loads>
void fma(std::size_t rounds) {
  float32x4_t left = vdupq_n_f32(1.0f), right = vdupq_n_f32(0x1p-10f);
  float32x4_t memory[Sums];
  for (float32x4_t& one : memory) one = right;
  float32x4_t sums[Sums] = {};
  const float32x4_t* source = memory;
  for (; rounds > 0; --rounds) {
    asm volatile("" : "+r"(source) : : "memory");
#pragma GCC unroll 24
    for (std::size_t i = 0; i < Sums; ++i) {
      asm volatile("" : "+w"(left));
      sums[i] = vfmaq_f32(sums[i], left, Loads ? source[i] : right);
    }
  }
#pragma GCC unroll 24
  for (std::size_t i = 0; i < Sums; ++i) asm volatile("" : "+w"(sums[i]));
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
  for (std::size_t i = 0; i < kSums; ++i) asm volatile("" : "+w"(sums[i]));
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
