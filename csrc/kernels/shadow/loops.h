// shadow with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/lanes/lanes.h"
#include "kernels/shadow/shadow.h"

namespace chunkrt {
namespace {

static_assert(kShadowChannelsPerBlock == kLanes && kGemmColumnsPerBlock == kLanes);

void find_in_block(const FindOutliersArgs& args, std::size_t block) {
  const OutlierLists& lists = args.lists;
  const std::size_t begin = block * kLanes, num_channels = args.width - begin;
  // Sizes that are known at compile time are cleared by two or four instructions.
  if (num_channels >= kLanes) {
    std::memset(lists.counts + begin, 0, kLanes * sizeof(*lists.counts));
  } else {
    std::memset(lists.counts + begin, 0, num_channels * sizeof(*lists.counts));
  }
  std::int32_t total = 0;
  for (std::size_t row = 0; row < args.num_rows; ++row) {
    const Floats x = load(args.input + row * args.width + begin, num_channels);
    const Mask inside = magnitude_less(x / all(args.step), all(kShadowThreshold));  // false for a NaN
    if (all_of(inside)) continue;
    float remainders[kLanes];
    store(remainders, x - with_sign(all(kShadowLevels * args.step), x));
    for (std::uint32_t outliers = ~bits(inside) & 0xffffu; outliers != 0; outliers &= outliers - 1) {
      const std::size_t lane = static_cast<std::size_t>(std::countr_zero(outliers)), channel = begin + lane;
      const std::size_t place = channel * args.num_rows + static_cast<std::size_t>(lists.counts[channel]++);
      lists.rows[place] = static_cast<std::int32_t>(row);
      lists.remainders[place] = remainders[lane];
      ++total;
    }
  }
  lists.block_counts[block] = total;
}

}  // namespace

void CHUNKRT_NAME(find_outliers_f32_f32)(const FindOutliersArgs& args, std::size_t block_begin,
                                         std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) find_in_block(args, block);
}

void CHUNKRT_NAME(dequantize_row_f32_s8col)(const DequantizeRowArgs& args, std::size_t block_begin,
                                            std::size_t block_end) {
  const std::size_t byte = args.channel % kGemmDepthPerGroup;
  const std::int8_t* group =
      args.packed + (block_begin * args.groups + args.channel / kGemmDepthPerGroup) * kGemmBytesPerGroup;
  float* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::size_t column = block * kLanes, count = args.columns - column;
    store(out, byte_of_words(group, byte) * load(args.scales + column, count), count);
    group += args.groups * kGemmBytesPerGroup;
    out += kLanes;
  }
}

void CHUNKRT_NAME(add_outer_product_f32_f32_f32)(const AddOuterProductArgs& args) {
  const std::size_t whole = args.columns / kLanes * kLanes;
  const Rest rest(args.columns - whole);
  for (std::size_t i = 0; i < args.count; ++i) {
    float* out = args.out + static_cast<std::size_t>(args.rows[i]) * args.out_stride;
    const Floats left = all(args.left[i]);
    for (std::size_t n = 0; n < whole; n += kLanes) {
      store(out + n, load(out + n) + left * load(args.right + n));
    }
    if (whole == args.columns) continue;
    store(out + whole, load(out + whole, rest) + left * load(args.right + whole, rest), rest);
  }
}

}  // namespace chunkrt
