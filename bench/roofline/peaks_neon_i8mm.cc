// Peaks of NEON's smmla: int8 products.
#include <arm_neon.h>

#include "peaks.h"

namespace chunkrt::roofline {
namespace {

// See peaks_avx2.cc.
template <std::size_t Sums, bool Loads>
void s8(std::size_t rounds) {
  int8x16_t left = vdupq_n_s8(0x35), right = vdupq_n_s8(0x5a);
  int8x16_t memory[Sums];
  for (int8x16_t& one : memory) one = right;
  int32x4_t sums[Sums] = {};
  const int8x16_t* source = memory;
  for (; rounds > 0; --rounds) {
    asm volatile("" : "+r"(source) : : "memory");
#pragma GCC unroll 24
    for (std::size_t i = 0; i < Sums; ++i) {
      asm volatile("" : "+w"(left));
      sums[i] = vmmlaq_s32(sums[i], left, Loads ? source[i] : right);
    }
  }
#pragma GCC unroll 24
  for (std::size_t i = 0; i < Sums; ++i) asm volatile("" : "+w"(sums[i]));
}

constexpr const char* kInstructions = "smmla, 128 bits";

constexpr Peak kPeaks[] = {
    {"int8", kInstructions, "16 sums, registers", 16 * 32, s8<16, false>},
    {"int8", kInstructions, "24 sums, registers", 24 * 32, s8<24, false>},
    {"int8", kInstructions, "24 sums, memory", 24 * 32, s8<24, true>},
};

}  // namespace

const PeakTable kPeaksNeonI8mm = {"neon_i8mm", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
