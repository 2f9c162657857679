// shadow with NEON.
#include <arm_neon.h>

#include "kernels/gemm/gemm.h"
#include "kernels/shadow/shadow.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 4;

// Loads the first min(count, 4) elements; the other lanes are 0.
float32x4_t load(const float* input, std::size_t count) {
  if (count >= kLanes) return vld1q_f32(input);
  float values[kLanes] = {};
  for (std::size_t i = 0; i < count; ++i) values[i] = input[i];
  return vld1q_f32(values);
}

void store(float* out, std::size_t count, float32x4_t x) {
  if (count >= kLanes) return vst1q_f32(out, x);
  float values[kLanes];
  vst1q_f32(values, x);
  for (std::size_t i = 0; i < count; ++i) out[i] = values[i];
}

// Finds the outliers of one vector of channels that starts at `begin`; at least 1 of these channels exists.
std::int32_t find_in_lanes(const FindOutliersArgs& args, std::size_t begin) {
  const OutlierLists& lists = args.lists;
  const std::size_t rest = args.width - begin, lanes = rest < kLanes ? rest : kLanes;
  const float32x4_t step = vdupq_n_f32(args.step), limit = vdupq_n_f32(kShadowLevels * args.step);
  const float32x4_t threshold = vdupq_n_f32(kShadowThreshold);
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  for (std::size_t lane = 0; lane < lanes; ++lane) lists.counts[begin + lane] = 0;
  std::int32_t total = 0;
  for (std::size_t row = 0; row < args.num_rows; ++row) {
    const float32x4_t x = load(args.input + row * args.width + begin, lanes);
    const uint32x4_t is_inside = vcaltq_f32(vdivq_f32(x, step), threshold);  // for magnitudes; false for NaN
    if (vminvq_u32(is_inside) != 0) continue;
    float remainders[kLanes];
    std::uint32_t inside[kLanes];
    vst1q_f32(remainders, vsubq_f32(x, vbslq_f32(sign, x, limit)));
    vst1q_u32(inside, is_inside);
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      if (inside[lane] != 0) continue;
      const std::size_t channel = begin + lane;
      const std::size_t place = channel * args.num_rows + static_cast<std::size_t>(lists.counts[channel]++);
      lists.rows[place] = static_cast<std::int32_t>(row);
      lists.remainders[place] = remainders[lane];
      ++total;
    }
  }
  return total;
}

}  // namespace

void find_outliers_f32_f32_neon(const FindOutliersArgs& args, std::size_t block_begin,
                                std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::size_t begin = block * kShadowChannelsPerBlock;
    std::int32_t total = 0;
    for (std::size_t i = 0; i < kShadowChannelsPerBlock && begin + i < args.width; i += kLanes) {
      total += find_in_lanes(args, begin + i);
    }
    args.lists.block_counts[block] = total;
  }
}

void dequantize_row_f32_s8col_neon(const DequantizeRowArgs& args, std::size_t block_begin,
                                   std::size_t block_end) {
  // Shifts the wanted byte of every column to the top of its lane, and back down with sign extension.
  const int32x4_t to_top = vdupq_n_s32(24 - 8 * static_cast<int>(args.channel % kGemmDepthPerGroup));
  const std::int8_t* group =
      args.packed + (block_begin * args.groups + args.channel / kGemmDepthPerGroup) * kGemmBytesPerGroup;
  float* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    for (std::size_t i = 0; i < kGemmColumnsPerBlock; i += kLanes) {
      const std::size_t column = block * kGemmColumnsPerBlock + i;
      if (column >= args.columns) break;
      const int32x4_t bytes = vreinterpretq_s32_s8(vld1q_s8(group + i * kGemmDepthPerGroup));
      const float32x4_t integers = vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(bytes, to_top), 24));
      const std::size_t count = args.columns - column;
      store(out, count, vmulq_f32(integers, load(args.scales + column, count)));
      out += kLanes;
    }
    group += args.groups * kGemmBytesPerGroup;
  }
}

void add_outer_product_f32_f32_f32_neon(const AddOuterProductArgs& args) {
  for (std::size_t i = 0; i < args.count; ++i) {
    float* out = args.out + static_cast<std::size_t>(args.rows[i]) * args.out_stride;
    for (std::size_t n = 0; n < args.columns; n += kLanes) {
      const std::size_t count = args.columns - n;
      const float32x4_t product = vmulq_n_f32(load(args.right + n, count), args.left[i]);
      store(out + n, count, vaddq_f32(load(out + n, count), product));
    }
  }
}

}  // namespace chunkrt
