// shadow with AVX-512.
#include <immintrin.h>

#include "kernels/gemm/gemm.h"
#include "kernels/lanes_avx512.h"
#include "kernels/shadow/shadow.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;

void find_in_block(const FindOutliersArgs& args, std::size_t block) {
  const OutlierLists& lists = args.lists;
  const std::size_t begin = block * kShadowChannelsPerBlock;
  const __mmask16 inside = first_lanes(args.width - begin);
  const __m512 step = _mm512_set1_ps(args.step), limit = _mm512_set1_ps(kShadowLevels * args.step);
  const __m512 threshold = _mm512_set1_ps(kShadowThreshold), sign = _mm512_set1_ps(-0.0f);
  _mm512_mask_storeu_epi32(lists.counts + begin, inside, _mm512_setzero_si512());
  std::int32_t total = 0;
  for (std::size_t row = 0; row < args.num_rows; ++row) {
    const __m512 x = _mm512_maskz_loadu_ps(inside, args.input + row * args.width + begin);
    const __m512 magnitude = _mm512_abs_ps(_mm512_div_ps(x, step));
    const __mmask16 outliers = _mm512_cmp_ps_mask(magnitude, threshold, _CMP_NLT_UQ);
    if (outliers == 0) continue;
    alignas(64) float remainders[kLanes];
    _mm512_store_ps(remainders, _mm512_sub_ps(x, _mm512_or_ps(limit, _mm512_and_ps(sign, x))));
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if ((outliers >> lane & 1) == 0) continue;
      const std::size_t channel = begin + lane;
      const std::size_t place = channel * args.num_rows + static_cast<std::size_t>(lists.counts[channel]++);
      lists.rows[place] = static_cast<std::int32_t>(row);
      lists.remainders[place] = remainders[lane];
      ++total;
    }
  }
  lists.block_counts[block] = total;
}

}  // namespace

void find_outliers_f32_f32_avx512vnni(const FindOutliersArgs& args, std::size_t block_begin,
                                      std::size_t block_end) {
  for (std::size_t block = block_begin; block < block_end; ++block) find_in_block(args, block);
}

void dequantize_row_f32_s8col_avx512vnni(const DequantizeRowArgs& args, std::size_t block_begin,
                                         std::size_t block_end) {
  const std::size_t place = args.channel % kGemmDepthPerGroup;
  // Shifts the wanted byte of every column to the top of its lane, and back down with sign extension.
  const __m128i to_top = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * place));
  const std::int8_t* group =
      args.packed + (block_begin * args.groups + args.channel / kGemmDepthPerGroup) * kGemmBytesPerGroup;
  float* out = args.out;
  for (std::size_t block = block_begin; block < block_end; ++block) {
    const std::size_t column = block * kGemmColumnsPerBlock;
    const __mmask16 inside = first_lanes(args.columns - column);
    const __m512i bytes = _mm512_loadu_si512(group);
    const __m512i integers = _mm512_srai_epi32(_mm512_sll_epi32(bytes, to_top), 24);
    const __m512 scales = _mm512_maskz_loadu_ps(inside, args.scales + column);
    store_lanes(out, inside, _mm512_mul_ps(_mm512_cvtepi32_ps(integers), scales));
    group += args.groups * kGemmBytesPerGroup;
    out += kGemmColumnsPerBlock;
  }
}

void add_outer_product_f32_f32_f32_avx512vnni(const AddOuterProductArgs& args) {
  const std::size_t whole = args.columns / kLanes * kLanes;
  const __mmask16 rest = first_lanes(args.columns - whole);
  for (std::size_t i = 0; i < args.count; ++i) {
    float* out = args.out + static_cast<std::size_t>(args.rows[i]) * args.out_stride;
    const __m512 left = _mm512_set1_ps(args.left[i]);
    for (std::size_t n = 0; n < whole; n += kLanes) {
      const __m512 product = _mm512_mul_ps(left, _mm512_loadu_ps(args.right + n));
      _mm512_storeu_ps(out + n, _mm512_add_ps(_mm512_loadu_ps(out + n), product));
    }
    if (rest == 0) continue;
    const __m512 product = _mm512_mul_ps(left, _mm512_maskz_loadu_ps(rest, args.right + whole));
    const __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(rest, out + whole), product);
    store_lanes(out + whole, rest, sum);
  }
}

}  // namespace chunkrt
