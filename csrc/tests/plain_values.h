// Arguments for the loops of kernels/block_gemm/tiles.h, in plain C++, except for the tiles: the values of 16
// rows by 16 columns, and a kernel for a few rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/block_gemm/tiles.h"
#include "kernels/list.h"
#include "tests/suite.h"

namespace chunkrt::testing {
namespace {

class PlainValues {
 public:
  static void unpack(const std::uint8_t* packed, std::int8_t* out) {
    check_aligned(out);
    for (std::size_t i = 0; i < kBlockBytes; ++i) {
      const std::size_t first = i / kLineBytes * 2 * kLineBytes + i % kLineBytes;
      out[first] = static_cast<std::int8_t>(packed[i] & 15);
      out[first + kLineBytes] = static_cast<std::int8_t>(packed[i] >> 4);
    }
  }

  static void widen_scales(const std::uint16_t* scales, float* out) {
    check_aligned(out);
    widen_f32_f16_reference(scales, out, 2 * kBlockColumns);
  }

  static void widen_sums(const std::int32_t* sums, std::size_t stride, std::size_t num_rows, float* out) {
    check_aligned(out);
    check(num_rows >= 1 && num_rows <= 16, "values have 1 to 16 rows");
    for (std::size_t m = 0; m < 16; ++m) out[m] = m < num_rows ? static_cast<float>(sums[m * stride]) : 0.0f;
  }

  void add(const std::int32_t* sums, const float* left_sums, const float* scales) {
    check_aligned(sums);
    check_aligned(scales);
    for (std::size_t m = 0; m < 16; ++m) {
      for (std::size_t n = 0; n < kBlockColumns; ++n) {
        float& value = of_[m][n];
        value = std::fma(static_cast<float>(sums[m * kBlockColumns + n]), scales[n], value);
        value = std::fma(left_sums[m], scales[kBlockColumns + n], value);
      }
    }
  }

  void store(const BlockGemmArgs& args, std::size_t row, std::size_t num_rows, std::size_t block) const {
    for (std::size_t m = 0; m < num_rows; ++m) {
      for (std::size_t n = 0; n < kBlockColumns; ++n) {
        const std::size_t column = block * kBlockColumns + n;
        if (column >= args.columns) break;
        float value = of_[m][n] * args.left_scales[row + m];
        if (args.bias != nullptr) value = value + args.bias[column];
        if (args.residual != nullptr) {
          value = value + args.residual[(row + m) * args.residual_stride + column];
        }
        args.out[(row + m) * args.out_stride + column] = value;
      }
    }
  }

 private:
  static void check_aligned(const void* address) {
    check(reinterpret_cast<std::uintptr_t>(address) % 64 == 0, "vectors are aligned to 64 bytes");
  }

  float of_[16][kBlockColumns] = {};
};

}  // namespace
}  // namespace chunkrt::testing
