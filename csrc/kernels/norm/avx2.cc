// norm with AVX2: two registers of partial sums hold the sixteen lanes.
#include <immintrin.h>

#include "kernels/lanes_avx2.h"
#include "kernels/norm/norm.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 8;

float fold(__m256 low, __m256 high) {
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

void norm_row(const RmsNormArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* out = args.out + row * args.width;
  __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
  for (std::size_t i = 0; i < args.width; i += 2 * kLanes) {
    const std::size_t count = args.width - i;
    const __m256 x = Lanes(count).load(input + i);
    const __m256 y = count > kLanes ? Lanes(count - kLanes).load(input + i + kLanes) : _mm256_setzero_ps();
    low = _mm256_add_ps(low, _mm256_mul_ps(x, x));
    high = _mm256_add_ps(high, _mm256_mul_ps(y, y));
  }
  const __m128 mean = _mm_set_ss(fold(low, high) / static_cast<float>(args.width) + args.epsilon);
  const __m256 inverse = _mm256_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(mean)));
  for (std::size_t i = 0; i < args.width; i += kLanes) {
    const Lanes lanes(args.width - i);
    const __m256 x = lanes.load(input + i), weight = lanes.load(args.weight + i);
    lanes.store(out + i, _mm256_mul_ps(_mm256_mul_ps(x, inverse), weight));
  }
}

}  // namespace

void rms_norm_f32_f32_avx2(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) norm_row(args, row);
}

}  // namespace chunkrt
