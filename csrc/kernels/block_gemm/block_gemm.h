// block_gemm: the product of int8 activation rows and a 4-bit weight in blocks, where each block has a
// float16 scale and minimum.
//
// The weight has GGUF's format Q4_1 (or Q4_0, whose minimum is -8 * scale), with blocks of 32 along the
// depth:
//   right[k, n] ~ q[k, n] * scale[b, n] + minimum[b, n],  q in 0..15, b = k / 32
// The product is, with b ascending from 0 and value = 0 initially:
//   value = fma(float(sum_{k in b} left[m, k] * q[k, n]), scale[b, n], value)
//   value = fma(float(sum_{k in b} left[m, k]), minimum[b, n], value)
//   out[m, n] = ((value * left_scales[m]) + bias[n]) + residual[m, n]
//
// The integer sums are exact, and each operation rounds once, in that order. So all instruction sets and all
// splits of rows or columns give bit-identical results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

inline constexpr std::size_t kBlockDepth = 32;
inline constexpr std::size_t kBlockColumns = 16;
// A block of kBlockDepth by kBlockColumns 4-bit integers.
inline constexpr std::size_t kBlockBytes = kBlockDepth * kBlockColumns / 2;

struct BlockGemmArgs {
  const std::int8_t* left;        // int8 [rows, depth_blocks * 32], row-major; in [-127, 127]
  const float* left_scales;       // float32 [rows]
  const std::int32_t* left_sums;  // int32 [rows, depth_blocks]: the sum of each block of each row of `left`
  // uint8 [ceil(N / 16), depth_blocks, 4, 16, 4]: the element [n / 16, k / 32, k % 32 / 8, n % 16, k % 4]
  // contains q[k, n] in the low half of the byte if k % 8 < 4, otherwise in the high half. Columns past N are
  // zeros. See chunkrt/engine_directory/store.py.
  const std::uint8_t* right;
  // float16 [ceil(N / 16), depth_blocks, 2, 16]: the scales of 16 columns, then their minima. Columns past N
  // are zeros.
  const std::uint16_t* right_scales;
  const float* bias;      // float32 [columns], or nullptr
  const float* residual;  // float32 [rows, residual_stride], or nullptr; may be `out` itself
  float* out;             // float32 [rows, out_stride]
  std::size_t rows;
  std::size_t columns;          // N
  std::size_t depth_blocks;     // K / 32
  std::size_t residual_stride;  // in elements
  std::size_t out_stride;       // in elements
  // The rows and the sums of their blocks in the layout of kernels/gemm/arranged.h; NEON with i8mm reads only
  // this copy.
  const std::int8_t* arranged = nullptr;
  // float32 [panel_scratch_floats(depth_blocks)], aligned to 64 bytes, exclusive to this call. Only AVX2 and
  // matrix tiles need it.
  float* scratch = nullptr;
};

// A part of a weight: a panel of a few blocks of 16 columns, with its integers as int8 and its scales and
// minima in float32. A panel is unpacked once for all rows, and fits in the second-level cache.
inline constexpr std::size_t kUnpackedBlockBytes = 2 * kBlockBytes + 2 * kBlockColumns * sizeof(float);
inline constexpr std::size_t kMostPanelBytes = 512 * 1024;
inline constexpr std::size_t kMostPanelBlocks = 4;

// Number of column blocks in a panel for matrix tiles; with AVX2 a panel is a single block.
constexpr std::size_t most_panel_blocks(std::size_t depth_blocks) {
  const std::size_t fit = kMostPanelBytes / (kUnpackedBlockBytes * (depth_blocks > 0 ? depth_blocks : 1));
  return fit < 1 ? 1 : fit < kMostPanelBlocks ? fit : kMostPanelBlocks;
}

// Number of floats for a panel, and for the block sums of 16 rows.
constexpr std::size_t panel_scratch_floats(std::size_t depth_blocks) {
  return depth_blocks * (most_panel_blocks(depth_blocks) * kUnpackedBlockBytes / sizeof(float) + 16);
}

// Computes the columns of blocks [block_begin, block_end) of 16 for all rows; columns past N are not written.
using BlockGemmFunction = void(const BlockGemmArgs& args, std::size_t block_begin, std::size_t block_end);

}  // namespace chunkrt
