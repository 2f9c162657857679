// norm with AVX-512.
#include <immintrin.h>

#include "kernels/lanes_avx512.h"
#include "kernels/norm/norm.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;

float fold(__m512 sums) {
  const __m256 low = _mm512_castps512_ps256(sums);
  const __m256 eight = _mm256_add_ps(low, _mm512_extractf32x8_ps(sums, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

void norm_row(const RmsNormArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* out = args.out + row * args.width;
  __m512 sums = _mm512_setzero_ps();
  for (std::size_t i = 0; i < args.width; i += kLanes) {
    const __m512 x = _mm512_maskz_loadu_ps(first_lanes(args.width - i), input + i);
    sums = _mm512_add_ps(sums, _mm512_mul_ps(x, x));
  }
  const __m128 mean = _mm_set_ss(fold(sums) / static_cast<float>(args.width) + args.epsilon);
  const __m512 inverse = _mm512_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(mean)));
  for (std::size_t i = 0; i < args.width; i += kLanes) {
    const __mmask16 mask = first_lanes(args.width - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, input + i);
    const __m512 weight = _mm512_maskz_loadu_ps(mask, args.weight + i);
    store_lanes(out + i, mask, _mm512_mul_ps(_mm512_mul_ps(x, inverse), weight));
  }
}

}  // namespace

void rms_norm_f32_f32_avx512vnni(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) norm_row(args, row);
}

}  // namespace chunkrt
