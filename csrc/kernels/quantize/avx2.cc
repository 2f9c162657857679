// quantize with AVX2.
#include <immintrin.h>

#include <cstring>

#include "kernels/lanes_avx2.h"
#include "kernels/quantize/quantize.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 8;
constexpr int kInfinityBits = 0x7f800000;
constexpr int kNanBits = 0x7fc00000;

float float_from_bits(int bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits))); }

// max|x| as the bit pattern of a float: the patterns of magnitudes compare like integers, with infinities and
// NaNs above all finite values.
int largest_magnitude_bits(const float* input, std::size_t width) {
  const __m256i magnitude_mask = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < width; i += kLanes) {
    const __m256i bits = _mm256_castps_si256(Lanes(width - i).load(input + i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude_mask));
  }
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0b01001110));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0b10110001)));
}

int sum_of_lanes(__m256i sums) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0b01001110));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0b10110001)));
}

// The first min(count, 8) integers; count is a multiple of 4.
void store_bytes(std::int8_t* values, std::size_t count, __m256i integers) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  const __m128i bytes = _mm_packs_epi16(words, words);
  if (count >= kLanes) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(values), bytes);
  } else {
    const std::int32_t quad = _mm_cvtsi128_si32(bytes);
    std::memcpy(values, &quad, sizeof(quad));
  }
}

void quantize_row(const QuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  std::int8_t* values = args.values + row * args.padded_width;
  const int bits = largest_magnitude_bits(input, args.width);
  const bool is_finite = bits < kInfinityBits;
  const float largest = float_from_bits(bits);
  const bool is_zero = !is_finite || largest < kQuantizeSmallestMagnitude;
  const __m256 inverse = _mm256_set1_ps(is_zero ? 0.0f : 127.0f / largest);
  const float scale = !is_finite ? float_from_bits(kNanBits) : is_zero ? 0.0f : largest / 127.0f;
  const __m256 kept = _mm256_castsi256_ps(_mm256_set1_epi32(is_zero ? 0 : -1));
  __m256i sums = _mm256_setzero_si256();
  for (std::size_t i = 0; i < args.padded_width; i += kLanes) {
    const __m256 x = Lanes(i >= args.width ? 0 : args.width - i).load(input + i);
    const __m256 scaled = _mm256_mul_ps(_mm256_and_ps(x, kept), inverse);
    const __m256i rounded =
        _mm256_cvtps_epi32(_mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    sums = _mm256_add_epi32(sums, rounded);
    store_bytes(values + i, args.padded_width - i, rounded);
  }
  args.sums[row] = sum_of_lanes(sums);
  args.scales[row] = scale;
}

void quantize_row_on_grid(const GridQuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  const std::size_t target = row * args.padded_width;
  const bool has_high = args.high.values != nullptr;
  const __m256 levels = _mm256_set1_ps(static_cast<float>(has_high ? kTwoDigitLevels : kOneDigitLevels));
  const __m256 negative_levels = _mm256_sub_ps(_mm256_setzero_ps(), levels);
  const __m256 step = _mm256_set1_ps(args.step);
  __m256 nans = _mm256_setzero_ps();
  __m256i low_sums = _mm256_setzero_si256(), high_sums = _mm256_setzero_si256();
  for (std::size_t i = 0; i < args.padded_width; i += kLanes) {
    const __m256 x = Lanes(i >= args.width ? 0 : args.width - i).load(input + i);
    const __m256 quotient = _mm256_div_ps(x, step);
    const __m256 is_nan = _mm256_cmp_ps(quotient, quotient, _CMP_UNORD_Q);
    nans = _mm256_or_ps(nans, is_nan);
    const __m256 bounded =
        _mm256_max_ps(negative_levels, _mm256_min_ps(levels, _mm256_andnot_ps(is_nan, quotient)));
    const __m256i q =
        _mm256_cvtps_epi32(_mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(128)), 8);
    const __m256i low = _mm256_sub_epi32(q, _mm256_slli_epi32(high, 8));
    store_bytes(args.low.values + target + i, args.padded_width - i, low);
    if (has_high) store_bytes(args.high.values + target + i, args.padded_width - i, high);
    low_sums = _mm256_add_epi32(low_sums, low);
    high_sums = _mm256_add_epi32(high_sums, high);
  }
  const float unit = _mm256_movemask_ps(nans) != 0 ? float_from_bits(kNanBits) : 1.0f;
  args.low.scales[row] = unit;
  args.low.sums[row] = sum_of_lanes(low_sums);
  if (has_high) {
    args.high.scales[row] = unit * 256.0f;
    args.high.sums[row] = sum_of_lanes(high_sums);
  }
}

}  // namespace

void quantize_s8row_f32_avx2(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row(args, row);
}

void quantize_s8grid_f32_avx2(const GridQuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row_on_grid(args, row);
}

}  // namespace chunkrt
