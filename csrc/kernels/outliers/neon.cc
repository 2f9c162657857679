// outliers with NEON.
#include <arm_neon.h>

#include <cstring>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/gemm/gemm.h"
#include "kernels/outliers/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 4, kSums = 16, kParts = kGemmColumnsPerBlock / kLanes;

float32x4_t load(const float* data, std::size_t count) {
  if (count >= kLanes) return vld1q_f32(data);
  float padded[kLanes] = {};
  std::memcpy(padded, data, count * sizeof(float));
  return vld1q_f32(padded);
}

void store(float* data, std::size_t count, float32x4_t value) {
  if (count >= kLanes) return vst1q_f32(data, value);
  float padded[kLanes];
  vst1q_f32(padded, value);
  std::memcpy(data, padded, count * sizeof(float));
}

void take_from_row(const TakeOutliersArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* rest = args.rest + row * args.width;
  float32x4_t sums[kSums], largest = vdupq_n_f32(0.0f);
  for (float32x4_t& sum : sums) sum = vdupq_n_f32(0.0f);
  for (std::size_t k = 0; k < args.width; k += kLanes) {
    const float32x4_t x = load(input + k, args.width - k);
    store(rest + k, args.width - k, x);
    float32x4_t& sum = sums[k / kLanes % kSums];
    sum = vaddq_f32(sum, vabsq_f32(x));
    largest = vmaxq_f32(largest, vabsq_f32(x));
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] = vaddq_f32(sums[i], sums[i + half]);
  }
  const float32x2_t two = vadd_f32(vget_low_f32(sums[0]), vget_high_f32(sums[0]));
  const float sum = vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  args.outliers.counts[row] = 0;
  const float32x4_t limits = vdupq_n_f32(kOutlierRatio * sum / static_cast<float>(args.width));
  if (vmaxvq_u32(vcgtq_f32(largest, limits)) == 0) return;
  for (std::size_t k = 0; k < args.width; k += kLanes) {
    const uint32x4_t found = vcagtq_f32(load(input + k, args.width - k), limits);
    if (vmaxvq_u32(found) == 0) continue;
    std::uint32_t is_outlier[kLanes];
    vst1q_u32(is_outlier, found);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (is_outlier[lane] != 0) take_one(args, row, k + lane);
    }
  }
}

void add_to_row(const AddOutliersArgs& args, std::size_t row, std::size_t block) {
  const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
  const float* values = args.outliers.values + row * args.outliers.capacity;
  const std::int8_t* packed = args.packed + block * args.groups * kGemmBytesPerGroup;
  float32x4_t sums[kParts] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
  for (std::int32_t i = 0; i < args.outliers.counts[row]; ++i) {
    const std::size_t k = static_cast<std::size_t>(channels[i]);
    // Shifts the wanted byte of every column to the top of its lane, and back down with sign extension.
    const int32x4_t to_top = vdupq_n_s32(24 - 8 * static_cast<int>(k % kGemmDepthPerGroup));
    const std::int8_t* group = packed + k / kGemmDepthPerGroup * kGemmBytesPerGroup;
    for (std::size_t part = 0; part < kParts; ++part) {
      const int32x4_t bytes = vreinterpretq_s32_s8(vld1q_s8(group + part * kLanes * kGemmDepthPerGroup));
      const float32x4_t weights = vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(bytes, to_top), 24));
      sums[part] = vfmaq_n_f32(sums[part], weights, values[i]);
    }
  }
  for (std::size_t part = 0; part < kParts; ++part) {
    const std::size_t column = block * kGemmColumnsPerBlock + part * kLanes;
    if (column >= args.columns) break;
    const std::size_t count = args.columns - column;
    float* out = args.out + row * args.columns + column;
    store(out, count, vfmaq_f32(load(out, count), sums[part], load(args.scales + column, count)));
  }
}

}  // namespace

void take_outliers_f32_f32_neon(const TakeOutliersArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) take_from_row(args, row);
}

void add_outliers_f32_s8col_neon(const AddOutliersArgs& args, std::size_t block_begin,
                                 std::size_t block_end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    if (args.outliers.counts[row] == 0) continue;
    for (std::size_t block = block_begin; block < block_end; ++block) add_to_row(args, row, block);
  }
}

void add_outliers_f32_u4block_neon(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                   std::size_t block_end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t count = args.outliers.counts[row];
    if (count == 0) continue;
    const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
    const float* values = args.outliers.values + row * args.outliers.capacity;
    for (std::size_t block = block_begin; block < block_end; ++block) {
      float32x4_t sums[kParts] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
      for (std::int32_t i = 0; i < count; ++i) {
        const std::size_t k = static_cast<std::size_t>(channels[i]);
        const std::size_t depth_block = block * args.depth_blocks + k / kBlockDepth;
        const std::uint8_t* group =
            args.right + depth_block * kBlockBytes + k % kBlockDepth / 8 * (kBlockColumns * 4);
        const std::uint16_t* scales = args.right_scales + depth_block * 2 * kBlockColumns;
        const int32x4_t to_bottom = vdupq_n_s32(-static_cast<int>(8 * (k % 4) + (k % 8 < 4 ? 0 : 4)));
        for (std::size_t part = 0; part < kParts; ++part) {
          const uint32x4_t bytes = vreinterpretq_u32_u8(vld1q_u8(group + part * kLanes * 4));
          const float32x4_t q = vcvtq_f32_u32(vandq_u32(vshlq_u32(bytes, to_bottom), vdupq_n_u32(15)));
          const float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales + part * kLanes)));
          const float32x4_t minimum =
              vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales + kBlockColumns + part * kLanes)));
          sums[part] = vfmaq_n_f32(sums[part], vfmaq_f32(minimum, q, scale), values[i]);
        }
      }
      for (std::size_t part = 0; part < kParts; ++part) {
        const std::size_t column = block * kBlockColumns + part * kLanes;
        if (column >= args.columns) break;
        float* out = args.out + row * args.columns + column;
        const std::size_t inside = args.columns - column;
        store(out, inside, vaddq_f32(load(out, inside), sums[part]));
      }
    }
  }
}

}  // namespace chunkrt
