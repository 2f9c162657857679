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

// The int8 weights of channels: of a channel, those of a block of columns.
struct ColumnWeights {
  const AddOutliersArgs& args;

  CHUNKRT_LANES Floats of(std::size_t channel, std::size_t block) const {
    const std::size_t group = block * args.groups + channel / kGemmDepthPerGroup;
    return byte_of_words(args.packed + group * kGemmBytesPerGroup, channel % kGemmDepthPerGroup);
  }
  CHUNKRT_LANES Floats sum(Floats products, Floats out, std::size_t column, std::size_t count) const {
    return multiply_add(products, load(args.scales + column, count), out);
  }
};

// The same of weights in 4-bit blocks.
struct BlockWeights {
  const AddBlockOutliersArgs& args;

  CHUNKRT_LANES Floats of(std::size_t channel, std::size_t block) const {
    const std::size_t depth_block = block * args.depth_blocks + channel / kBlockDepth;
    const std::uint8_t* group =
        args.right + depth_block * kBlockBytes + channel % kBlockDepth / 8 * (kBlockColumns * 4);
    const std::uint16_t* scales = args.right_scales + depth_block * 2 * kBlockColumns;
    const Floats q = four_bits_of_words(group, 8 * (channel % 4) + (channel % 8 < 4 ? 0 : 4));
    return multiply_add(q, load_halves(scales), load_halves(scales + kBlockColumns));
  }
  CHUNKRT_LANES Floats sum(Floats products, Floats out, std::size_t, std::size_t) const {
    return out + products;
  }
};

// The weights of some channels and of adjacent blocks of columns in float32. The outliers of most rows are in
// the same channels, so their weights are converted for the first of these rows only. Channels with the same
// remainder use the same place in turn.
template <std::size_t Blocks>
struct ConvertedWeights {
  static constexpr std::size_t kPlaces = 64;

  std::int32_t channels[kPlaces];
  alignas(64) float weights[kPlaces][Blocks * kLanes];
};

// Adds the outliers' products to the columns of adjacent blocks.
template <std::size_t Blocks, typename Args, typename Weights>
CHUNKRT_LANES void add_to_blocks(const Args& args, const Weights& weights, std::size_t block) {
  ConvertedWeights<Blocks> converted;
  for (std::int32_t& channel : converted.channels) channel = -1;
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
    const float* values = args.outliers.values + row * args.outliers.capacity;
    const std::int32_t num_outliers = args.outliers.counts[row];
    if (num_outliers == 0) continue;
    Floats products[Blocks];
    for (Floats& each : products) each = all(0.0f);
    for (std::int32_t i = 0; i < num_outliers; ++i) {
      const std::size_t channel = static_cast<std::size_t>(channels[i]);
      const std::size_t place = channel % ConvertedWeights<Blocks>::kPlaces;
      float* const own = converted.weights[place];
      if (converted.channels[place] != channels[i]) {
        converted.channels[place] = channels[i];
        for (std::size_t b = 0; b < Blocks; ++b) store(own + b * kLanes, weights.of(channel, block + b));
      }
      const Floats value = all(values[i]);
      for (std::size_t b = 0; b < Blocks; ++b) {
        products[b] = multiply_add(value, load(own + b * kLanes), products[b]);
      }
    }
    for (std::size_t b = 0; b < Blocks; ++b) {
      const std::size_t column = (block + b) * kLanes, count = args.columns - column;
      float* out = args.out + row * args.columns + column;
      store(out, weights.sum(products[b], load(out, count), column, count), count);
    }
  }
}

// Adds the outliers' products to the columns of blocks [begin, end).
template <typename Args, typename Weights>
CHUNKRT_LANES void add_products(const Args& args, const Weights& weights, std::size_t begin,
                                std::size_t end) {
  constexpr std::size_t kMost = 6, kFewer = 2;
  std::size_t block = begin;
  for (; block + kMost <= end; block += kMost) add_to_blocks<kMost>(args, weights, block);
  for (; block + kFewer <= end; block += kFewer) add_to_blocks<kFewer>(args, weights, block);
  for (; block < end; ++block) add_to_blocks<1>(args, weights, block);
}

}  // namespace

void CHUNKRT_NAME(take_outliers_f32_f32)(const TakeOutliersArgs& args, std::size_t row_begin,
                                         std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) take_from_row(args, row);
}

void CHUNKRT_NAME(add_outliers_f32_s8col)(const AddOutliersArgs& args, std::size_t block_begin,
                                          std::size_t block_end) {
  add_products(args, ColumnWeights{args}, block_begin, block_end);
}

void CHUNKRT_NAME(add_outliers_f32_u4block)(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                            std::size_t block_end) {
  add_products(args, BlockWeights{args}, block_begin, block_end);
}

}  // namespace chunkrt
