// quantize with AVX-512.
#include <immintrin.h>

#include "kernels/quantize/quantize.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;
constexpr int kInfinityBits = 0x7f800000;
constexpr int kNanBits = 0x7fc00000;

__mmask16 first_lanes(std::size_t count) {
  return count >= kLanes ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1u);
}

// max|x| as the bits of a float: bits of magnitudes order like integers, with infinities and NaNs on top.
int largest_magnitude_bits(const float* input, std::size_t width) {
  const __m512i magnitude_mask = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (std::size_t i = 0; i < width; i += kLanes) {
    const __m512i bits = _mm512_maskz_loadu_epi32(first_lanes(width - i), input + i);
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, magnitude_mask));
  }
  return _mm512_reduce_max_epi32(largest);
}

void quantize_row(const QuantizeArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  std::int8_t* values = args.values + row * args.padded_width;
  const int bits = largest_magnitude_bits(input, args.width);
  const bool is_finite = bits < kInfinityBits;
  const float largest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
  const bool is_zero = !is_finite || largest < kQuantizeSmallestMagnitude;
  const __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : 127.0f / largest);
  __m512i sums = _mm512_setzero_si512();
  for (std::size_t i = 0; i < args.padded_width; i += kLanes) {
    const __mmask16 inside = is_zero || i >= args.width ? __mmask16{0} : first_lanes(args.width - i);
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(inside, input + i), inverse);
    const __m512i rounded = _mm512_cvt_roundps_epi32(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    sums = _mm512_add_epi32(sums, rounded);
    _mm512_mask_cvtepi32_storeu_epi8(values + i, first_lanes(args.padded_width - i), rounded);
  }
  args.sums[row] = _mm512_reduce_add_epi32(sums);
  args.scales[row] = is_zero ? 0.0f : largest / 127.0f;
  if (!is_finite) args.scales[row] = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(kNanBits)));
}

}  // namespace

void quantize_s8row_f32_avx512vnni(const QuantizeArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) quantize_row(args, row);
}

}  // namespace chunkrt
