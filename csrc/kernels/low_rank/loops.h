// low_rank with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/lanes/lanes.h"
#include "kernels/low_rank/low_rank.h"

namespace chunkrt {
namespace {

static_assert(kLowRankBlock == kLanes && kLowRankParts == 4);

constexpr std::size_t kBlocksAtOnce = 16;   // their stored b stays in the first-level cache
constexpr std::size_t kBlocksOfOneRow = 4;  // so that the products of a single row are independent

// The sums of one part of Rows adjacent rows, float32 [Rows, 16].
template <std::size_t Rows>
void sum_part(const LowRankDownArgs& args, std::size_t row, std::size_t part, float* out,
              std::size_t out_stride) {
  const std::size_t first = low_rank_part(args.depth, part);
  Floats sums[Rows][1];
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) sums[m][0] = all(0.0f);
  add_products(sums, args.left + row * args.depth + first, args.depth, args.a + first * kLanes, kLanes,
               low_rank_part(args.depth, part + 1) - first,
               [](const float* a, std::size_t) { return load(a); });
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) store(out + m * out_stride, sums[m][0]);
}

// The sums of Parts adjacent parts of one row, float32 [Parts, 16]. The chains of the parts are independent.
template <std::size_t Parts>
void sum_parts_of_row(const LowRankDownArgs& args, std::size_t row, std::size_t part, float* out,
                      std::size_t out_stride) {
  const float* left[Parts];
  const float* a[Parts];
  Floats sums[Parts];
  for (std::size_t p = 0; p < Parts; ++p) {
    const std::size_t first = low_rank_part(args.depth, part + p);
    left[p] = args.left + row * args.depth + first;
    a[p] = args.a + first * kLanes;
    sums[p] = all(0.0f);
  }
  // The last parts may be shorter than the first one.
  const std::size_t all_parts =
      low_rank_part(args.depth, part + Parts) - low_rank_part(args.depth, part + Parts - 1);
  for (std::size_t k = 0; k < all_parts; ++k) {
#pragma GCC unroll 4
    for (std::size_t p = 0; p < Parts; ++p) {
      sums[p] = multiply_add(all(left[p][k]), load(a[p] + k * kLanes), sums[p]);
    }
  }
#pragma GCC unroll 4
  for (std::size_t p = 0; p < Parts; ++p) {
    const std::size_t count = low_rank_part(args.depth, part + p + 1) - low_rank_part(args.depth, part + p);
    for (std::size_t k = all_parts; k < count; ++k) {
      sums[p] = multiply_add(all(left[p][k]), load(a[p] + k * kLanes), sums[p]);
    }
    store(out + p * out_stride, sums[p]);
  }
}

// Stores the sums of the parts of Rows adjacent rows in float32 [Rows, 16].
template <std::size_t Rows>
void add_parts(const float (&parts)[kLowRankParts][Rows * kLanes], float* out, std::size_t out_stride) {
  for (std::size_t m = 0; m < Rows; ++m) {
    const std::size_t at = m * kLanes;
    const Floats first = load(parts[0] + at) + load(parts[1] + at);
    store(out + m * out_stride, first + (load(parts[2] + at) + load(parts[3] + at)));
  }
}

// The tile of kProductRows rows.
void reduce_rows(const LowRankDownArgs& args, std::size_t row, std::size_t begin, std::size_t end) {
  float* out = args.out + row * args.out_stride;
  if (args.part_stride > 0) {
    for (std::size_t part = begin; part < end; ++part) {
      sum_part<kProductRows>(args, row, part, out + part * args.part_stride, args.out_stride);
    }
    return;
  }
  float parts[kLowRankParts][kProductRows * kLanes];
  for (std::size_t part = 0; part < kLowRankParts; ++part) {
    sum_part<kProductRows>(args, row, part, parts[part], kLanes);
  }
  add_parts<kProductRows>(parts, out, args.out_stride);
}

void reduce_row(const LowRankDownArgs& args, std::size_t row, std::size_t begin, std::size_t end) {
  float* out = args.out + row * args.out_stride;
  if (args.part_stride == 0) {
    float parts[kLowRankParts][kLanes];
    sum_parts_of_row<kLowRankParts>(args, row, 0, parts[0], kLanes);
    return add_parts<1>(parts, out, args.out_stride);
  }
  std::size_t part = begin;
  for (; part + 2 <= end; part += 2) {
    sum_parts_of_row<2>(args, row, part, out + part * args.part_stride, args.part_stride);
  }
  if (part < end) sum_parts_of_row<1>(args, row, part, out + part * args.part_stride, args.part_stride);
}

// Adds to the first columns of a block, or to all of them, for Rows adjacent rows.
template <std::size_t Rows, typename... Part>
void expand_tile(const LowRankUpArgs& args, const LowRankSpan& span, std::size_t row, std::size_t column,
                 Part... rest) {
  float* out = args.out + row * args.columns + column;
  Floats sums[Rows][1];
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) sums[m][0] = load(out + m * args.columns, rest...);
  add_products(sums, args.left + row * args.left_stride + span.first_rank, args.left_stride,
               args.b + span.first_row * kLanes, kLanes, span.num_ranks,
               [](const float* b, std::size_t) { return load(b); });
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) store(out + m * args.columns, sums[m][0], rest...);
}

template <std::size_t Rows>
void expand_block(const LowRankUpArgs& args, std::size_t row, std::size_t block) {
  const std::size_t column = block * kLanes, count = args.columns - column;
  if (count >= kLanes) {
    expand_tile<Rows>(args, args.spans[block], row, column);
  } else {
    expand_tile<Rows>(args, args.spans[block], row, column, Rest(count));
  }
}

// Adds to the columns of kBlocksOfOneRow adjacent blocks that have the ranks of the first one.
void expand_blocks_of_row(const LowRankUpArgs& args, std::size_t row, std::size_t block) {
  const auto [first_rank, num_ranks, first_row] = args.spans[block];
  const float* left = args.left + row * args.left_stride + first_rank;
  const float* b = args.b + first_row * kLanes;
  float* out = args.out + row * args.columns + block * kLanes;
  Floats sums[kBlocksOfOneRow];
#pragma GCC unroll 4
  for (std::size_t v = 0; v < kBlocksOfOneRow; ++v) sums[v] = load(out + v * kLanes);
  for (std::size_t j = 0; j < num_ranks; ++j) {
    const Floats factor = all(left[j]);
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kBlocksOfOneRow; ++v) {
      sums[v] = multiply_add(factor, load(b + (v * num_ranks + j) * kLanes), sums[v]);
    }
  }
#pragma GCC unroll 4
  for (std::size_t v = 0; v < kBlocksOfOneRow; ++v) store(out + v * kLanes, sums[v]);
}

// Returns true if kBlocksOfOneRow blocks are whole and have equal ranks.
bool are_alike(const LowRankUpArgs& args, std::size_t block, std::size_t end) {
  if (block + kBlocksOfOneRow > end || (block + kBlocksOfOneRow) * kLanes > args.columns) return false;
  const LowRankSpan& first = args.spans[block];
  for (std::size_t v = 1; v < kBlocksOfOneRow; ++v) {
    const LowRankSpan& other = args.spans[block + v];
    if (other.first_rank != first.first_rank || other.num_ranks != first.num_ranks) return false;
  }
  return true;
}

void expand_row(const LowRankUpArgs& args, std::size_t row, std::size_t begin, std::size_t end) {
  for (std::size_t block = begin; block < end;) {
    if (are_alike(args, block, end)) {
      expand_blocks_of_row(args, row, block);
      block += kBlocksOfOneRow;
    } else {
      expand_block<1>(args, row, block++);
    }
  }
}

}  // namespace

void CHUNKRT_NAME(low_rank_down_f32_f32)(const LowRankDownArgs& args, std::size_t begin, std::size_t end) {
  std::size_t row = 0;
  for (; row + kProductRows <= args.rows; row += kProductRows) reduce_rows(args, row, begin, end);
  for (; row < args.rows; ++row) reduce_row(args, row, begin, end);
}

void CHUNKRT_NAME(low_rank_up_f32_f32)(const LowRankUpArgs& args, std::size_t begin, std::size_t end) {
  for (std::size_t block = begin; block < end; block += kBlocksAtOnce) {
    const std::size_t last = block + kBlocksAtOnce < end ? block + kBlocksAtOnce : end;
    std::size_t row = 0;
    for (; row + kProductRows <= args.rows; row += kProductRows) {
      for (std::size_t one = block; one < last; ++one) expand_block<kProductRows>(args, row, one);
    }
    for (; row < args.rows; ++row) expand_row(args, row, block, last);
  }
}

}  // namespace chunkrt
