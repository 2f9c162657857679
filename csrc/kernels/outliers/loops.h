// outliers with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/gemm/gemm.h"
#include "kernels/lanes/lanes.h"
#include "kernels/outliers/list.h"

namespace chunkrt {
namespace {

static_assert(kGemmColumnsPerBlock == kLanes && kBlockColumns == kLanes);

constexpr std::size_t kSums = 4;

// Copies the first `count` of 64 adjacent elements, or all of them, and adds their magnitudes to the sums.
template <bool IsWhole>
CHUNKRT_LANES void measure(const float* input, float* rest, std::size_t count, Floats (&sums)[kSums]) {
#pragma GCC unroll 4
  for (std::size_t v = 0; v < kSums; ++v) {
    const std::size_t k = v * kLanes, left = IsWhole ? kLanes : count > k ? count - k : 0;
    const Floats x = load(input + k, left);
    store(rest + k, x, left);
    sums[v] = sums[v] + absolute(x);
  }
}

// Lists the outliers among the first `count` of 64 adjacent elements, or all of them.
template <bool IsWhole>
CHUNKRT_LANES void take_beyond(const TakeOutliersArgs& args, std::size_t row, std::size_t begin,
                               std::size_t count, Floats limit) {
  const float* const input = args.input + row * args.width + begin;
  std::uint64_t found = 0;
#pragma GCC unroll 4
  for (std::size_t v = 0; v < kSums; ++v) {
    const std::size_t k = v * kLanes, left = IsWhole ? kLanes : count > k ? count - k : 0;
    found |= std::uint64_t{bits(less(limit, absolute(load(input + k, left))))} << k;
  }
  for (; found != 0; found &= found - 1) {
    take_one(args, row, begin + static_cast<std::size_t>(std::countr_zero(found)));
  }
}

void take_from_row(const TakeOutliersArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* rest = args.rest + row * args.width;
  constexpr std::size_t kAtOnce = kSums * kLanes;
  const std::size_t whole = args.width / kAtOnce * kAtOnce, left = args.width - whole;
  Floats sums[kSums] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
  for (std::size_t k = 0; k < whole; k += kAtOnce) measure<true>(input + k, rest + k, kAtOnce, sums);
  if (left > 0) measure<false>(input + whole, rest + whole, left, sums);
  args.outliers.counts[row] = 0;
  const float total = sum((sums[0] + sums[2]) + (sums[1] + sums[3]));
  const Floats limit = all(kOutlierRatio * total / static_cast<float>(args.width));
  for (std::size_t k = 0; k < whole; k += kAtOnce) take_beyond<true>(args, row, k, kAtOnce, limit);
  if (left > 0) take_beyond<false>(args, row, whole, left, limit);
}

// The products of one row with adjacent blocks of columns.
template <std::size_t Blocks>
void add_to_row(const AddOutliersArgs& args, std::size_t row, std::size_t block) {
  const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
  const float* values = args.outliers.values + row * args.outliers.capacity;
  const std::int8_t* packed = args.packed + block * args.groups * kGemmBytesPerGroup;
  Floats sums[Blocks];
  for (Floats& each : sums) each = all(0.0f);
  for (std::int32_t i = 0; i < args.outliers.counts[row]; ++i) {
    const std::size_t k = static_cast<std::size_t>(channels[i]);
    const Floats value = all(values[i]);
    const std::int8_t* group = packed + k / kGemmDepthPerGroup * kGemmBytesPerGroup;
    for (std::size_t b = 0; b < Blocks; ++b) {
      const std::int8_t* words = group + b * args.groups * kGemmBytesPerGroup;
      sums[b] = multiply_add(value, byte_of_words(words, k % kGemmDepthPerGroup), sums[b]);
    }
  }
  for (std::size_t b = 0; b < Blocks; ++b) {
    const std::size_t column = (block + b) * kLanes, count = args.columns - column;
    float* out = args.out + row * args.columns + column;
    store(out, multiply_add(sums[b], load(args.scales + column, count), load(out, count)), count);
  }
}

}  // namespace

void CHUNKRT_NAME(take_outliers_f32_f32)(const TakeOutliersArgs& args, std::size_t row_begin,
                                         std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) take_from_row(args, row);
}

void CHUNKRT_NAME(add_outliers_f32_s8col)(const AddOutliersArgs& args, std::size_t block_begin,
                                          std::size_t block_end) {
  constexpr std::size_t kBlocksAtOnce = 3;
  for (std::size_t row = 0; row < args.rows; ++row) {
    if (args.outliers.counts[row] == 0) continue;
    std::size_t block = block_begin;
    for (; block + kBlocksAtOnce <= block_end; block += kBlocksAtOnce) {
      add_to_row<kBlocksAtOnce>(args, row, block);
    }
    for (; block < block_end; ++block) add_to_row<1>(args, row, block);
  }
}

void CHUNKRT_NAME(add_outliers_f32_u4block)(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                            std::size_t block_end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t count = args.outliers.counts[row];
    if (count == 0) continue;
    const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
    const float* values = args.outliers.values + row * args.outliers.capacity;
    for (std::size_t block = block_begin; block < block_end; ++block) {
      Floats sums = all(0.0f);
      for (std::int32_t i = 0; i < count; ++i) {
        const std::size_t k = static_cast<std::size_t>(channels[i]);
        const std::size_t depth_block = block * args.depth_blocks + k / kBlockDepth;
        const std::uint8_t* group =
            args.right + depth_block * kBlockBytes + k % kBlockDepth / 8 * (kBlockColumns * 4);
        const std::uint16_t* scales = args.right_scales + depth_block * 2 * kBlockColumns;
        const Floats q = four_bits_of_words(group, 8 * (k % 4) + (k % 8 < 4 ? 0 : 4));
        const Floats weight = multiply_add(q, load_halves(scales), load_halves(scales + kBlockColumns));
        sums = multiply_add(all(values[i]), weight, sums);
      }
      const std::size_t column = block * kLanes, inside = args.columns - column;
      float* out = args.out + row * args.columns + column;
      store(out, load(out, inside) + sums, inside);
    }
  }
}

}  // namespace chunkrt
