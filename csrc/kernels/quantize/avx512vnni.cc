// quantize with AVX-512.
#include <immintrin.h>

#include "kernels/lanes_avx512.h"
#include "kernels/quantize/quantize.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;
constexpr int kInfinityBits = 0x7f800000;
constexpr int kNanBits = 0x7fc00000;

// max|x| as the bit pattern of a float: the patterns of magnitudes compare like integers, with infinities and
// NaNs above all finite values.
int largest_magnitude_bits(const float* input, std::size_t width) {
  const __m512i magnitude_mask = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512(), others = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    const __m512i bits = _mm512_loadu_si512(input + i), more_bits = _mm512_loadu_si512(input + i + kLanes);
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, magnitude_mask));
    others = _mm512_max_epi32(others, _mm512_and_si512(more_bits, magnitude_mask));
  }
  for (; i < width; i += kLanes) {
    const __m512i bits = _mm512_maskz_loadu_epi32(first_lanes(width - i), input + i);
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, magnitude_mask));
  }
  return _mm512_reduce_max_epi32(_mm512_max_epi32(largest, others));
}

__m512i round(__m512 x) { return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

void quantize_row(const QuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  std::int8_t* values = args.values + row * args.padded_width;
  const int bits = largest_magnitude_bits(input, args.width);
  const bool is_finite = bits < kInfinityBits;
  const float largest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
  const bool is_zero = !is_finite || largest < kQuantizeSmallestMagnitude;
  const __mmask16 kept = is_zero ? __mmask16{0} : __mmask16{0xffff};
  const __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : 127.0f / largest);
  const float nan = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(kNanBits)));
  __m512i sums = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; i + kLanes <= args.width; i += kLanes) {  // masked stores are many times slower
    const __m512 x = _mm512_loadu_ps(input + i);
    const __m512i rounded = round(_mm512_maskz_mul_ps(kept, x, inverse));
    sums = _mm512_add_epi32(sums, rounded);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), _mm512_cvtepi32_epi8(rounded));
  }
  if (i < args.padded_width) {
    const __mmask16 inside = first_lanes(args.width - i);
    const __m512 x = _mm512_maskz_loadu_ps(inside, input + i);
    const __m512i rounded = round(_mm512_maskz_mul_ps(kept, x, inverse));
    sums = _mm512_add_epi32(sums, rounded);
    _mm512_mask_cvtepi32_storeu_epi8(values + i, first_lanes(args.padded_width - i), rounded);
  }
  args.sums[row] = _mm512_reduce_add_epi32(sums);
  args.scales[row] = !is_finite ? nan : is_zero ? 0.0f : largest / 127.0f;
}

void quantize_row_on_grid(const GridQuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  const std::size_t target = row * args.padded_width;
  const bool has_high = args.high.values != nullptr;
  const __m512 levels = _mm512_set1_ps(static_cast<float>(has_high ? kTwoDigitLevels : kOneDigitLevels));
  const __m512 negative_levels = _mm512_sub_ps(_mm512_setzero_ps(), levels);
  const __m512 step = _mm512_set1_ps(args.step);
  bool has_nan = false;
  __m512i low_sums = _mm512_setzero_si512(), high_sums = _mm512_setzero_si512();
  for (std::size_t i = 0; i < args.padded_width; i += kLanes) {
    const __mmask16 inside = i >= args.width ? __mmask16{0} : first_lanes(args.width - i);
    const __m512 quotient = _mm512_div_ps(_mm512_maskz_loadu_ps(inside, input + i), step);
    const __mmask16 is_number = _mm512_cmp_ps_mask(quotient, quotient, _CMP_ORD_Q);
    has_nan = has_nan || is_number != 0xffff;
    const __m512 bounded = _mm512_max_ps(negative_levels, _mm512_min_ps(levels, quotient));
    const __m512i q =
        _mm512_maskz_cvt_roundps_epi32(is_number, bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
    const __mmask16 stored = first_lanes(args.padded_width - i);
    _mm512_mask_cvtepi32_storeu_epi8(args.low.values + target + i, stored, low);
    if (has_high) _mm512_mask_cvtepi32_storeu_epi8(args.high.values + target + i, stored, high);
    low_sums = _mm512_add_epi32(low_sums, low);
    high_sums = _mm512_add_epi32(high_sums, high);
  }
  const float unit = has_nan ? _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(kNanBits))) : 1.0f;
  args.low.scales[row] = unit;
  args.low.sums[row] = _mm512_reduce_add_epi32(low_sums);
  if (has_high) {
    args.high.scales[row] = unit * 256.0f;
    args.high.sums[row] = _mm512_reduce_add_epi32(high_sums);
  }
}

}  // namespace

void quantize_s8row_f32_avx512vnni(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row(args, row);
}

void quantize_s8grid_f32_avx512vnni(const GridQuantizeArgs& args, std::size_t row_begin,
                                    std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row_on_grid(args, row);
}

}  // namespace chunkrt
