// shadow with AVX2.
#include <immintrin.h>

#include "kernels/gemm/gemm.h"
#include "kernels/lanes_avx2.h"
#include "kernels/shadow/shadow.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 8;

__m256i first_lanes(std::size_t count) {
  const int lanes = count < kLanes ? static_cast<int>(count) : static_cast<int>(kLanes);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Finds the outliers of one vector of channels that starts at `begin`; at least 1 of these channels exists.
std::int32_t find_in_lanes(const FindOutliersArgs& args, std::size_t begin) {
  const OutlierLists& lists = args.lists;
  const __m256i inside = first_lanes(args.width - begin);
  const __m256 step = _mm256_set1_ps(args.step), limit = _mm256_set1_ps(kShadowLevels * args.step);
  const __m256 threshold = _mm256_set1_ps(kShadowThreshold), sign = _mm256_set1_ps(-0.0f);
  _mm256_maskstore_epi32(lists.counts + begin, inside, _mm256_setzero_si256());
  std::int32_t total = 0;
  for (std::size_t row = 0; row < args.num_rows; ++row) {
    const __m256 x = _mm256_maskload_ps(args.input + row * args.width + begin, inside);
    const __m256 magnitude = _mm256_andnot_ps(sign, _mm256_div_ps(x, step));
    const int outliers = _mm256_movemask_ps(_mm256_cmp_ps(magnitude, threshold, _CMP_NLT_UQ));
    if (outliers == 0) continue;
    alignas(32) float remainders[kLanes];
    _mm256_store_ps(remainders, _mm256_sub_ps(x, _mm256_or_ps(limit, _mm256_and_ps(sign, x))));
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if ((outliers >> lane & 1) == 0) continue;
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

void find_outliers_f32_f32_avx2(const FindOutliersArgs& args, std::size_t block_begin,
                                std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::size_t begin = block * kShadowChannelsPerBlock;
    std::int32_t total = find_in_lanes(args, begin);
    if (begin + kLanes < args.width) total += find_in_lanes(args, begin + kLanes);
    args.lists.block_counts[block] = total;
  }
}

void dequantize_row_f32_s8col_avx2(const DequantizeRowArgs& args, std::size_t block_begin,
                                   std::size_t block_end) {
  const std::size_t place = args.channel % kGemmDepthPerGroup;
  // Shifts the wanted byte of every column to the top of its lane, and back down with sign extension.
  const __m128i to_top = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * place));
  const std::int8_t* group =
      args.packed + (block_begin * args.groups + args.channel / kGemmDepthPerGroup) * kGemmBytesPerGroup;
  float* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    for (std::size_t half = 0; half < kGemmColumnsPerBlock / kLanes; ++half) {
      const std::size_t column = block * kGemmColumnsPerBlock + half * kLanes;
      if (column >= args.columns) break;
      const Lanes lanes(args.columns - column);
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group) + half);
      const __m256i integers = _mm256_srai_epi32(_mm256_sll_epi32(bytes, to_top), 24);
      lanes.store(out, _mm256_mul_ps(_mm256_cvtepi32_ps(integers), lanes.load(args.scales + column)));
      out += kLanes;
    }
    group += args.groups * kGemmBytesPerGroup;
  }
}

void add_outer_product_f32_f32_f32_avx2(const AddOuterProductArgs& args) {
  const std::size_t whole = args.columns / kLanes * kLanes;
  const Lanes rest(args.columns - whole);
  for (std::size_t i = 0; i < args.count; ++i) {
    float* out = args.out + static_cast<std::size_t>(args.rows[i]) * args.out_stride;
    const __m256 left = _mm256_set1_ps(args.left[i]);
    for (std::size_t n = 0; n < whole; n += kLanes) {
      const __m256 product = _mm256_mul_ps(left, _mm256_loadu_ps(args.right + n));
      _mm256_storeu_ps(out + n, _mm256_add_ps(_mm256_loadu_ps(out + n), product));
    }
    if (whole == args.columns) continue;
    const __m256 product = _mm256_mul_ps(left, rest.load(args.right + whole));
    rest.store(out + whole, _mm256_add_ps(rest.load(out + whole), product));
  }
}

}  // namespace chunkrt
