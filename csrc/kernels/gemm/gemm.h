// gemm: int8 matrix product of activation rows and a packed weight, with float32 scales.
//
//   out[m, n] = ((float(sum_k left[m, k] * right[k, n]) * left_scales[m]) * right_scales[n] + bias[n]) +
//   residual[m, n]
//
// Each operation of the right-hand side rounds once, in that order, and the integer sum is exact. So all
// instruction sets and all splits of rows or columns give bit-identical results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

// The packed layout of `right`: int8 [ceil(N / 16), ceil(K / 4), 16, 4], zero-padded, with right[k, n] at [n
// / 16, k / 4, n % 16, k % 4]. See chunkrt/engine_directory/store.py.
inline constexpr std::size_t kGemmColumnsPerBlock = 16;
inline constexpr std::size_t kGemmDepthPerGroup = 4;
inline constexpr std::size_t kGemmBytesPerGroup = kGemmColumnsPerBlock * kGemmDepthPerGroup;

// Largest K whose sum fits int32 for any int8 operands: 128 * 128 * K < 2^31.
inline constexpr std::size_t kGemmMaxDepth = 131071;

struct GemmArgs {
  const std::int8_t* left;   // int8 [rows, groups * 4], row-major, zero-padded
  const float* left_scales;  // float32 [rows]
  const std::int32_t*
      left_sums;  // int32 [rows]: the sum of each row of `left`, for unsigned-by-signed dot products
  const std::int8_t* right;   // int8, packed as above
  const float* right_scales;  // float32 [columns]
  const float* bias;          // float32 [columns], or nullptr
  const float* residual;      // float32 [rows, residual_stride], or nullptr; may be `out` itself
  float* out;                 // float32 [rows, out_stride]
  std::size_t rows;
  std::size_t columns;          // N
  std::size_t groups;           // ceil(K / 4)
  std::size_t residual_stride;  // in elements
  std::size_t out_stride;       // in elements
  // The rows of `left` in the layout of arranged.h for this instruction set, or nullptr; nullptr is slower.
  const std::int8_t* arranged = nullptr;
};

// Computes the columns of blocks [block_begin, block_end) for all rows; columns past N are not written.
using GemmFunction = void(const GemmArgs& args, std::size_t block_begin, std::size_t block_end);

}  // namespace chunkrt
