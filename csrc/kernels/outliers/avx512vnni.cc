// outliers with AVX-512.
#include <immintrin.h>

#include <bit>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/gemm/gemm.h"
#include "kernels/lanes_avx512.h"
#include "kernels/outliers/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16, kMostBlocksAtOnce = 3;

constexpr std::size_t kSums = 4;

float fold(const __m512 (&sums)[kSums]) {
  const __m512 sixteen = _mm512_add_ps(_mm512_add_ps(sums[0], sums[2]), _mm512_add_ps(sums[1], sums[3]));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps(sixteen, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Calls visit(k, v, x) for every vector x of a row, where v is its index among four adjacent vectors.
template <typename Visit>
void for_each_vector(const float* input, std::size_t width, const Visit& visit) {
  std::size_t k = 0;
  for (; k + kSums * kLanes <= width; k += kSums * kLanes) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kSums; ++v) visit(k + v * kLanes, v, _mm512_loadu_ps(input + k + v * kLanes));
  }
  for (std::size_t v = 0; k < width; ++v, k += kLanes) {
    visit(k, v, _mm512_maskz_loadu_ps(first_lanes(width - k), input + k));
  }
}

void take_from_row(const TakeOutliersArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* rest = args.rest + row * args.width;
  __m512 sums[kSums] = {}, largest[kSums] = {};
  for_each_vector(input, args.width, [&](std::size_t k, std::size_t v, __m512 x) {
    store_lanes(rest + k, first_lanes(args.width - k), x);
    sums[v] = _mm512_add_ps(sums[v], _mm512_abs_ps(x));
    largest[v] = _mm512_max_ps(largest[v], _mm512_abs_ps(x));
  });
  args.outliers.counts[row] = 0;
  const __m512 limit = _mm512_set1_ps(kOutlierRatio * fold(sums) / static_cast<float>(args.width));
  const auto beyond = [&](__m512 magnitude) { return _mm512_cmp_ps_mask(magnitude, limit, _CMP_GT_OQ); };
  const __m512 all =
      _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3]));
  if (beyond(all) == 0) return;
  for_each_vector(input, args.width, [&](std::size_t k, std::size_t, __m512 x) {
    for (std::uint32_t found = beyond(_mm512_abs_ps(x)); found != 0; found &= found - 1) {
      take_one(args, row, k + static_cast<std::size_t>(std::countr_zero(found)));
    }
  });
}

// The products of one row with adjacent blocks of columns.
template <std::size_t kBlocks>
void add_to_row(const AddOutliersArgs& args, std::size_t row, std::size_t block) {
  const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
  const float* values = args.outliers.values + row * args.outliers.capacity;
  const std::int8_t* packed = args.packed + block * args.groups * kGemmBytesPerGroup;
  __m512 sums[kBlocks] = {};
  for (std::int32_t i = 0; i < args.outliers.counts[row]; ++i) {
    const std::size_t k = static_cast<std::size_t>(channels[i]);
    // Shifts the wanted byte of every column to the top of its lane, and back down with sign extension.
    const __m128i to_top = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * (k % kGemmDepthPerGroup)));
    const __m512 value = _mm512_set1_ps(values[i]);
    const std::int8_t* group = packed + k / kGemmDepthPerGroup * kGemmBytesPerGroup;
    for (std::size_t b = 0; b < kBlocks; ++b) {
      const __m512i bytes = _mm512_loadu_si512(group + b * args.groups * kGemmBytesPerGroup);
      const __m512i integers = _mm512_srai_epi32(_mm512_sll_epi32(bytes, to_top), 24);
      sums[b] = _mm512_fmadd_ps(value, _mm512_cvtepi32_ps(integers), sums[b]);
    }
  }
  for (std::size_t b = 0; b < kBlocks; ++b) {
    const std::size_t column = (block + b) * kGemmColumnsPerBlock;
    const __mmask16 inside = first_lanes(args.columns - column);
    float* out = args.out + row * args.columns + column;
    const __m512 scales = _mm512_maskz_loadu_ps(inside, args.scales + column);
    const __m512 result = _mm512_fmadd_ps(sums[b], scales, _mm512_maskz_loadu_ps(inside, out));
    store_lanes(out, inside, result);
  }
}

}  // namespace

void take_outliers_f32_f32_avx512vnni(const TakeOutliersArgs& args, std::size_t row_begin,
                                      std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) take_from_row(args, row);
}

void add_outliers_f32_s8col_avx512vnni(const AddOutliersArgs& args, std::size_t block_begin,
                                       std::size_t block_end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    if (args.outliers.counts[row] == 0) continue;
    std::size_t block = block_begin;
    for (; block + kMostBlocksAtOnce <= block_end; block += kMostBlocksAtOnce) {
      add_to_row<kMostBlocksAtOnce>(args, row, block);
    }
    for (; block < block_end; ++block) add_to_row<1>(args, row, block);
  }
}

void add_outliers_f32_u4block_avx512vnni(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                         std::size_t block_end) {
  const __m512i four_bits = _mm512_set1_epi32(15);
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t count = args.outliers.counts[row];
    if (count == 0) continue;
    const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
    const float* values = args.outliers.values + row * args.outliers.capacity;
    for (std::size_t block = block_begin; block < block_end; ++block) {
      __m512 sum = _mm512_setzero_ps();
      for (std::int32_t i = 0; i < count; ++i) {
        const std::size_t k = static_cast<std::size_t>(channels[i]);
        const std::size_t depth_block = block * args.depth_blocks + k / kBlockDepth;
        const std::uint8_t* group =
            args.right + depth_block * kBlockBytes + k % kBlockDepth / 8 * (kBlockColumns * 4);
        const std::uint16_t* scales = args.right_scales + depth_block * 2 * kBlockColumns;
        const __m128i to_bottom = _mm_cvtsi32_si128(static_cast<int>(8 * (k % 4) + (k % 8 < 4 ? 0 : 4)));
        const __m512i shifted = _mm512_srl_epi32(_mm512_loadu_si512(group), to_bottom);
        const __m512 q = _mm512_cvtepi32_ps(_mm512_and_si512(shifted, four_bits));
        const auto* halves = reinterpret_cast<const __m256i*>(scales);
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
        sum = _mm512_fmadd_ps(_mm512_set1_ps(values[i]), _mm512_fmadd_ps(q, scale, minimum), sum);
      }
      const std::size_t column = block * kBlockColumns;
      const __mmask16 inside = first_lanes(args.columns - column);
      float* out = args.out + row * args.columns + column;
      store_lanes(out, inside, _mm512_add_ps(_mm512_maskz_loadu_ps(inside, out), sum));
    }
  }
}

}  // namespace chunkrt
