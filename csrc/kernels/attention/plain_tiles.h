// The tile operations of kernels/attention/tile_products.h in plain loops, for the reference kernel.
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace chunkrt {
namespace {

class PlainTiles {
 public:
  void configure(std::size_t) {}

  template <std::size_t Tile>
  void zero() {
    std::memset(sums_[Tile], 0, sizeof(sums_[Tile]));
  }

  template <std::size_t Tile>
  void load_sums(const float* sums, std::size_t stride) {
    for (std::size_t row = 0; row < kRows; ++row) {
      std::memcpy(sums_[Tile][row], reinterpret_cast<const std::byte*>(sums) + row * stride, kRowBytes);
    }
  }

  // The first elements of all pairs in one row, the second ones in another.
  template <std::size_t Tile>
  void load(const std::uint16_t* values, std::size_t stride) {
    auto& operand = operands_[Tile - kFirstOperand];
    for (std::size_t row = 0; row < kRows; ++row) {
      std::uint32_t pairs[kRows], bits[2][kRows];
      std::memcpy(pairs, reinterpret_cast<const std::byte*>(values) + row * stride, kRowBytes);
      for (std::size_t i = 0; i < kRows; ++i) {
        bits[0][i] = pairs[i] << 16;
        bits[1][i] = pairs[i] & 0xffff0000u;
      }
      std::memcpy(operand[row], bits, sizeof(bits));
    }
  }

  // Products of two bfloat16 are exact. As in TDPBF16PS, first and second elements are summed separately.
  template <std::size_t Sum, std::size_t Left, std::size_t Right>
  void multiply() {
    const auto& left = operands_[Left - kFirstOperand];
    const auto& right = operands_[Right - kFirstOperand];
    for (std::size_t row = 0; row < kRows; ++row) {
      float firsts[kRows] = {}, seconds[kRows] = {};
      for (std::size_t k = 0; k < kRows; ++k) {
        const float first = left[row][0][k], second = left[row][1][k];
        for (std::size_t i = 0; i < kRows; ++i) {
          firsts[i] += first * right[k][0][i];
          seconds[i] += second * right[k][1][i];
        }
      }
      for (std::size_t i = 0; i < kRows; ++i) sums_[Sum][row][i] += firsts[i] + seconds[i];
    }
  }

  template <std::size_t Tile>
  void store(float* sums, std::size_t stride) const {
    for (std::size_t row = 0; row < kRows; ++row) {
      std::memcpy(reinterpret_cast<std::byte*>(sums) + row * stride, sums_[Tile][row], kRowBytes);
    }
  }

 private:
  static constexpr std::size_t kRows = 16, kRowBytes = 64, kFirstOperand = 4;

  float sums_[4][kRows][kRows];
  float operands_[4][kRows][2][kRows];
};

}  // namespace
}  // namespace chunkrt
