// unpack: conversion of a weight of 4-bit integers, with an integer multiplier for each block, to the int8
// products that gemm takes.
//
//   out[k, n] = (q[k, n] - 8) * multipliers[k / 32, n],  q in 0..15, multipliers in 1..16
//
// A product is from -8 * 16 = -128 to 7 * 16 = 112. For other multipliers, which only a damaged file
// contains, the product may be any number.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

inline constexpr std::size_t kUnpackDepth = 32;       // number of k in a block
inline constexpr std::size_t kUnpackColumns = 16;     // number of adjacent columns
inline constexpr std::size_t kUnpackGroupBytes = 64;  // four values along k; packed: two such groups
inline constexpr std::size_t kUnpackGroups = 8;       // number of groups in a block
inline constexpr std::size_t kUnpackBlockBytes = kUnpackDepth * kUnpackColumns / 2;
inline constexpr std::int32_t kUnpackZero = 8;  // the q that stands for 0

struct UnpackArgs {
  // uint8 [ceil(N / 16), ceil(K / 32), 4, 16, 4]: q, in the layout of block_gemm.h.
  const std::uint8_t* packed;
  const std::uint8_t* multipliers;  // uint8 [ceil(N / 16), ceil(K / 32), 16]; zeros past N
  std::int8_t* out;    // int8 [block_end - block_begin, groups, 16, 4], as the right side of gemm.h
  std::size_t groups;  // ceil(K / 4)
};

// Unpacks the columns of blocks [block_begin, block_end) of 16.
using UnpackFunction = void(const UnpackArgs& args, std::size_t block_begin, std::size_t block_end);

}  // namespace chunkrt
