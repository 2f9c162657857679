// outliers with AVX2.
#include <immintrin.h>

#include <bit>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/gemm/gemm.h"
#include "kernels/lanes_avx2.h"
#include "kernels/outliers/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 8;

__m256 magnitude_of(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

constexpr std::size_t kSums = 8;

float fold(const __m256 (&sums)[kSums]) {
  const __m256 first = _mm256_add_ps(_mm256_add_ps(sums[0], sums[4]), _mm256_add_ps(sums[2], sums[6]));
  const __m256 second = _mm256_add_ps(_mm256_add_ps(sums[1], sums[5]), _mm256_add_ps(sums[3], sums[7]));
  const __m256 eight = _mm256_add_ps(first, second);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

void take_from_row(const TakeOutliersArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* rest = args.rest + row * args.width;
  __m256 sums[kSums] = {}, largest = _mm256_setzero_ps();
  std::size_t k = 0;
  const auto measure = [&](std::size_t v, __m256 x) {
    sums[v] = _mm256_add_ps(sums[v], magnitude_of(x));
    largest = _mm256_max_ps(largest, magnitude_of(x));
  };
  for (; k + kSums * kLanes <= args.width; k += kSums * kLanes) {
    for (std::size_t v = 0; v < kSums; ++v) {
      const __m256 x = _mm256_loadu_ps(input + k + v * kLanes);
      _mm256_storeu_ps(rest + k + v * kLanes, x);
      measure(v, x);
    }
  }
  for (std::size_t v = 0; k < args.width; ++v, k += kLanes) {
    const Lanes lanes(args.width - k);
    const __m256 x = lanes.load(input + k);
    lanes.store(rest + k, x);
    measure(v, x);
  }
  args.outliers.counts[row] = 0;
  const __m256 limit = _mm256_set1_ps(kOutlierRatio * fold(sums) / static_cast<float>(args.width));
  const auto beyond = [&](__m256 magnitudes) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(magnitudes, limit, _CMP_GT_OQ)));
  };
  if (beyond(largest) == 0) return;
  for (k = 0; k < args.width; k += kLanes) {
    std::uint32_t found = beyond(magnitude_of(Lanes(args.width - k).load(input + k)));
    for (; found != 0; found &= found - 1) {
      take_one(args, row, k + static_cast<std::size_t>(std::countr_zero(found)));
    }
  }
}

void add_to_row(const AddOutliersArgs& args, std::size_t row, std::size_t block) {
  const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
  const float* values = args.outliers.values + row * args.outliers.capacity;
  const std::int8_t* packed = args.packed + block * args.groups * kGemmBytesPerGroup;
  __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (std::int32_t i = 0; i < args.outliers.counts[row]; ++i) {
    const std::size_t k = static_cast<std::size_t>(channels[i]);
    // Shifts the wanted byte of every column to the top of its lane, and back down with sign extension.
    const __m128i to_top = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * (k % kGemmDepthPerGroup)));
    const __m256 value = _mm256_set1_ps(values[i]);
    const auto* group =
        reinterpret_cast<const __m256i*>(packed + k / kGemmDepthPerGroup * kGemmBytesPerGroup);
    for (std::size_t half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_sll_epi32(_mm256_loadu_si256(group + half), to_top);
      sums[half] = _mm256_fmadd_ps(value, _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 24)), sums[half]);
    }
  }
  for (std::size_t half = 0; half < 2; ++half) {
    const std::size_t column = block * kGemmColumnsPerBlock + half * kLanes;
    if (column >= args.columns) break;
    const Lanes lanes(args.columns - column);
    float* out = args.out + row * args.columns + column;
    lanes.store(out, _mm256_fmadd_ps(sums[half], lanes.load(args.scales + column), lanes.load(out)));
  }
}

}  // namespace

void take_outliers_f32_f32_avx2(const TakeOutliersArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) take_from_row(args, row);
}

void add_outliers_f32_s8col_avx2(const AddOutliersArgs& args, std::size_t block_begin,
                                 std::size_t block_end) {
  for (std::size_t row = 0; row < args.rows; ++row) {
    if (args.outliers.counts[row] == 0) continue;
    for (std::size_t block = block_begin; block < block_end; ++block) add_to_row(args, row, block);
  }
}

void add_outliers_f32_u4block_avx2(const AddBlockOutliersArgs& args, std::size_t block_begin,
                                   std::size_t block_end) {
  const __m256i four_bits = _mm256_set1_epi32(15);
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t count = args.outliers.counts[row];
    if (count == 0) continue;
    const std::int32_t* channels = args.outliers.channels + row * args.outliers.capacity;
    const float* values = args.outliers.values + row * args.outliers.capacity;
    for (std::size_t block = block_begin; block < block_end; ++block) {
      __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
      for (std::int32_t i = 0; i < count; ++i) {
        const std::size_t k = static_cast<std::size_t>(channels[i]);
        const std::size_t depth_block = block * args.depth_blocks + k / kBlockDepth;
        const std::uint8_t* group =
            args.right + depth_block * kBlockBytes + k % kBlockDepth / 8 * (kBlockColumns * 4);
        const auto* integers = reinterpret_cast<const __m256i*>(group);
        const auto* halves =
            reinterpret_cast<const __m128i*>(args.right_scales + depth_block * 2 * kBlockColumns);
        const __m128i to_bottom = _mm_cvtsi32_si128(static_cast<int>(8 * (k % 4) + (k % 8 < 4 ? 0 : 4)));
        for (std::size_t half = 0; half < 2; ++half) {
          const __m256i shifted = _mm256_srl_epi32(_mm256_loadu_si256(integers + half), to_bottom);
          const __m256 q = _mm256_cvtepi32_ps(_mm256_and_si256(shifted, four_bits));
          const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(halves + half));
          const __m256 minimum = _mm256_cvtph_ps(_mm_loadu_si128(halves + 2 + half));
          const __m256 weight = _mm256_fmadd_ps(q, scale, minimum);
          sums[half] = _mm256_fmadd_ps(_mm256_set1_ps(values[i]), weight, sums[half]);
        }
      }
      for (std::size_t half = 0; half < 2; ++half) {
        const std::size_t column = block * kBlockColumns + half * kLanes;
        if (column >= args.columns) break;
        const Lanes lanes(args.columns - column);
        float* out = args.out + row * args.columns + column;
        lanes.store(out, _mm256_add_ps(lanes.load(out), sums[half]));
      }
    }
  }
}

}  // namespace chunkrt
