// float32 to bfloat16 in a loop that compilers vectorise. One file for each instruction set includes this
// header; nothing here is visible outside of that file.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace chunkrt {
namespace {

// The nearest bfloat16, ties to even.
inline std::uint16_t to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = bits + 0x7fffu + (bits >> 16 & 1u), quiet = bits | 0x400000u;
  return static_cast<std::uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest) >> 16);
}

inline void round_plainly(const float* values, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = to_bfloat(values[i]);
}

}  // namespace
}  // namespace chunkrt
