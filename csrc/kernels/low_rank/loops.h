// low_rank with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/lanes/lanes.h"
#include "kernels/low_rank/low_rank.h"

namespace chunkrt {
namespace {

static_assert(kLowRankBlock == kLanes && kLowRankParts == 4);

// Writes a part's sums of Rows adjacent rows, float32 [Rows, 16].
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

template <std::size_t Rows>
void reduce_tile(const LowRankDownArgs& args, std::size_t row, std::size_t begin, std::size_t end) {
  float* out = args.out + row * args.out_stride;
  if (end - begin == 1) return sum_part<Rows>(args, row, begin, out, args.out_stride);
  float parts[kLowRankParts][Rows * kLanes];
  for (std::size_t part = 0; part < kLowRankParts; ++part) {
    sum_part<Rows>(args, row, part, parts[part], kLanes);
  }
  for (std::size_t m = 0; m < Rows; ++m) {
    const std::size_t at = m * kLanes;
    const Floats first = load(parts[0] + at) + load(parts[1] + at);
    store(out + m * args.out_stride, first + (load(parts[2] + at) + load(parts[3] + at)));
  }
}

// Adds to the first `count` columns of a block, or to all of them, for Rows adjacent rows.
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

template <typename... Part>
void expand_block(const LowRankUpArgs& args, std::size_t block, Part... rest) {
  const LowRankSpan& span = args.spans[block];
  if (span.num_ranks == 0) return;
  const std::size_t column = block * kLanes;
  std::size_t row = 0;
  for (; row + kProductRows <= args.rows; row += kProductRows) {
    expand_tile<kProductRows>(args, span, row, column, rest...);
  }
  for (; row + 2 <= args.rows; row += 2) expand_tile<2>(args, span, row, column, rest...);
  for (; row < args.rows; ++row) expand_tile<1>(args, span, row, column, rest...);
}

}  // namespace

void CHUNKRT_NAME(low_rank_down_f32_f32)(const LowRankDownArgs& args, std::size_t begin, std::size_t end) {
  std::size_t row = 0;
  for (; row + kProductRows <= args.rows; row += kProductRows) {
    reduce_tile<kProductRows>(args, row, begin, end);
  }
  for (; row + 2 <= args.rows; row += 2) reduce_tile<2>(args, row, begin, end);
  for (; row < args.rows; ++row) reduce_tile<1>(args, row, begin, end);
}

void CHUNKRT_NAME(low_rank_up_f32_f32)(const LowRankUpArgs& args, std::size_t begin, std::size_t end) {
  for (std::size_t block = begin; block < end; ++block) {
    const std::size_t count = args.columns - block * kLanes;
    if (count >= kLanes) {
      expand_block(args, block);
    } else {
      expand_block(args, block, Rest(count));
    }
  }
}

}  // namespace chunkrt
