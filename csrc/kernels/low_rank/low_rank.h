// low_rank: the two products of a LoRA adapter, in float32. The first product reduces a row to the ranks of
// the adapter; the second product expands the ranks, and is added to the result of a linear.
//
//   h[m, j] = (p[0] + p[1]) + (p[2] + p[3]), where p[i] is the chain fma(left[m, k], a[k, j], p[i])
//             over the k of part i, ascending, from 0
//   out[m, n] = the chain fma(h[m, j], b[j, n], out[m, n]) over j ascending, from the given out[m, n]
//
// Part i consists of the k from low_rank_part(depth, i) to before low_rank_part(depth, i + 1). The parts let
// several threads compute one row. Each operation rounds once, in this order, so all instruction sets and all
// splits give bit-identical results.
#pragma once

#include <cstddef>

namespace chunkrt {

inline constexpr std::size_t kLowRankBlock = 16;  // number of ranks, or of columns, in a block
inline constexpr std::size_t kLowRankParts = 4;

constexpr std::size_t low_rank_part(std::size_t depth, std::size_t part) {
  const std::size_t begin = part * ((depth + kLowRankParts - 1) / kLowRankParts);
  return begin < depth ? begin : depth;
}

struct LowRankDownArgs {
  const float* left;       // float32 [rows, depth]
  const float* a;          // float32 [depth, 16]: a block of ranks
  float* out;              // float32 [rows, 16]
  std::size_t out_stride;  // distance of its rows
  // If above 0, the result of each part p[i] is stored separately, float32 [parts, rows, 16]; this is the
  // distance of the parts.
  std::size_t part_stride;
  std::size_t rows;
  std::size_t depth;
};

// Computes the parts [begin, end) for a block of ranks; if they are not stored separately, they are all
// parts.
using LowRankDownFunction = void(const LowRankDownArgs& args, std::size_t begin, std::size_t end);

// The ranks that contribute to a block of columns. The other ranks of b are 0 there, and are not stored.
struct LowRankSpan {
  std::size_t first_rank;
  std::size_t num_ranks;
  std::size_t first_row;  // the row of first_rank in the stored b
};

struct LowRankUpArgs {
  const float* left;         // float32 [rows, ranks]: h
  std::size_t left_stride;   // distance of its rows
  const float* b;            // float32 [stored rows, 16]
  const LowRankSpan* spans;  // by block of columns
  float* out;                // float32 [rows, columns]
  std::size_t rows;
  std::size_t columns;
};

// Adds to the columns of blocks [begin, end).
using LowRankUpFunction = void(const LowRankUpArgs& args, std::size_t begin, std::size_t end);

}  // namespace chunkrt
