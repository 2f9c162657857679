// Vectors of 16 lanes in an AVX-512 register; lanes.h includes this header, and avx2.h describes the
// operations.
#pragma once

#include <immintrin.h>

#define CHUNKRT_NAME(kernel) kernel##_avx512vnni

namespace chunkrt {
namespace {

struct Floats {
  __m512 of;
};

struct Ints {
  __m512i of;
};

struct Mask {
  __mmask16 of;
};

constexpr bool kHasMasks = true;

struct Rest {
  CHUNKRT_LANES explicit Rest(std::size_t count) : of(static_cast<__mmask16>((1u << count) - 1u)) {}
  __mmask16 of;
};

CHUNKRT_LANES Floats all(float x) { return {_mm512_set1_ps(x)}; }
CHUNKRT_LANES Ints all_ints(int x) { return {_mm512_set1_epi32(x)}; }

CHUNKRT_LANES Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
CHUNKRT_LANES Ints load_ints(const void* from) { return {_mm512_loadu_si512(from)}; }
CHUNKRT_LANES Floats load(const float* from, Rest rest) { return {_mm512_maskz_loadu_ps(rest.of, from)}; }
CHUNKRT_LANES void store(float* to, Floats x) { _mm512_storeu_ps(to, x.of); }
CHUNKRT_LANES void store(float* to, Floats x, Rest rest) { _mm512_mask_storeu_ps(to, rest.of, x.of); }
template <std::size_t>
CHUNKRT_LANES void store_at_least(float* to, Floats x) {
  store(to, x);
}

CHUNKRT_LANES Floats operator+(Floats x, Floats y) { return {_mm512_add_ps(x.of, y.of)}; }
CHUNKRT_LANES Floats operator-(Floats x, Floats y) { return {_mm512_sub_ps(x.of, y.of)}; }
CHUNKRT_LANES Floats operator*(Floats x, Floats y) { return {_mm512_mul_ps(x.of, y.of)}; }
CHUNKRT_LANES Floats operator/(Floats x, Floats y) { return {_mm512_div_ps(x.of, y.of)}; }
CHUNKRT_LANES Floats multiply_add(Floats x, Floats y, Floats z) {
  return {_mm512_fmadd_ps(x.of, y.of, z.of)};
}
CHUNKRT_LANES Floats multiply_subtract(Floats x, Floats y, Floats z) {
  return {_mm512_fmsub_ps(x.of, y.of, z.of)};
}
CHUNKRT_LANES Floats min(Floats x, Floats y) { return {_mm512_min_ps(x.of, y.of)}; }
CHUNKRT_LANES Floats max(Floats x, Floats y) { return {_mm512_max_ps(x.of, y.of)}; }
CHUNKRT_LANES Floats operator-(Floats x) { return {_mm512_xor_ps(x.of, _mm512_set1_ps(-0.0f))}; }
CHUNKRT_LANES Floats absolute(Floats x) { return {_mm512_abs_ps(x.of)}; }
CHUNKRT_LANES Floats negative(Floats x) { return {_mm512_or_ps(_mm512_set1_ps(-0.0f), x.of)}; }
CHUNKRT_LANES Floats with_sign(Floats magnitude, Floats x) {
  return {_mm512_or_ps(magnitude.of, _mm512_and_ps(_mm512_set1_ps(-0.0f), x.of))};
}
CHUNKRT_LANES Floats round(Floats x) {
  return {_mm512_roundscale_ps(x.of, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
CHUNKRT_LANES Ints to_ints(Floats x) {
  return {_mm512_cvt_roundps_epi32(x.of, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
CHUNKRT_LANES Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.of)}; }
CHUNKRT_LANES Ints bits_of(Floats x) { return {_mm512_castps_si512(x.of)}; }
CHUNKRT_LANES Floats from_bits(Ints x) { return {_mm512_castsi512_ps(x.of)}; }

CHUNKRT_LANES Ints operator+(Ints x, Ints y) { return {_mm512_add_epi32(x.of, y.of)}; }
CHUNKRT_LANES Ints operator-(Ints x, Ints y) { return {_mm512_sub_epi32(x.of, y.of)}; }
CHUNKRT_LANES Ints operator&(Ints x, Ints y) { return {_mm512_and_si512(x.of, y.of)}; }
CHUNKRT_LANES Ints max(Ints x, Ints y) { return {_mm512_max_epi32(x.of, y.of)}; }
template <int Bits>
CHUNKRT_LANES Ints shift_left(Ints x) {
  return {_mm512_slli_epi32(x.of, Bits)};
}
template <int Bits>
CHUNKRT_LANES Ints shift_right(Ints x) {
  return {_mm512_srai_epi32(x.of, Bits)};
}

CHUNKRT_LANES Floats scale_by_power(Floats p, Floats n) { return {_mm512_scalef_ps(p.of, n.of)}; }

CHUNKRT_LANES Mask less(Floats x, Floats y) { return {_mm512_cmp_ps_mask(x.of, y.of, _CMP_LT_OQ)}; }
CHUNKRT_LANES Mask magnitude_less(Floats x, Floats y) { return less(absolute(x), absolute(y)); }
CHUNKRT_LANES Mask is_number(Floats x) { return {_mm512_cmp_ps_mask(x.of, x.of, _CMP_ORD_Q)}; }
CHUNKRT_LANES Mask operator&(Mask x, Mask y) { return {static_cast<__mmask16>(x.of & y.of)}; }
CHUNKRT_LANES Mask lanes_between(int begin, int end) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return Mask{_mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(end))} &
         Mask{_mm512_cmpge_epi32_mask(lanes, _mm512_set1_epi32(begin))};
}
CHUNKRT_LANES std::uint32_t bits(Mask mask) { return mask.of; }
CHUNKRT_LANES bool any_of(Mask mask) { return mask.of != 0; }
CHUNKRT_LANES bool all_of(Mask mask) { return mask.of == 0xffff; }
CHUNKRT_LANES Floats select(Mask mask, Floats x, Floats y) {
  return {_mm512_mask_blend_ps(mask.of, y.of, x.of)};
}
CHUNKRT_LANES Floats keep(Mask mask, Floats x) { return {_mm512_maskz_mov_ps(mask.of, x.of)}; }
CHUNKRT_LANES Floats zero_if_less(Floats x, Floats limit, Floats y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.of, limit.of, _CMP_NLT_UQ), y.of)};
}

template <int Distance>
CHUNKRT_LANES Floats exchange(Floats x) {
  if constexpr (Distance == 1) return {_mm512_permute_ps(x.of, 0xb1)};
  if constexpr (Distance == 2) return {_mm512_permute_ps(x.of, 0x4e)};
  if constexpr (Distance == 4) return {_mm512_shuffle_f32x4(x.of, x.of, 0xb1)};
  if constexpr (Distance == 8) return {_mm512_shuffle_f32x4(x.of, x.of, 0x4e)};
}

CHUNKRT_LANES float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

CHUNKRT_LANES float sum(Floats x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.of), _mm512_extractf32x8_ps(x.of, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
CHUNKRT_LANES float largest(Floats x) { return _mm512_reduce_max_ps(x.of); }
CHUNKRT_LANES std::int32_t sum(Ints x) { return _mm512_reduce_add_epi32(x.of); }
CHUNKRT_LANES std::int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x.of); }

CHUNKRT_LANES Floats load_halves(const std::uint16_t* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
CHUNKRT_LANES Floats load_halves(const std::uint16_t* from, Rest rest) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest.of, from))};
}
CHUNKRT_LANES void store_halves(std::uint16_t* to, Floats x) {
  const __m256i halves = _mm512_cvtps_ph(x.of, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
CHUNKRT_LANES void store_halves(std::uint16_t* to, Floats x, Rest rest) {
  _mm256_mask_storeu_epi16(to, rest.of, _mm512_cvtps_ph(x.of, _MM_FROUND_TO_NEAREST_INT));
}

CHUNKRT_LANES Ints to_bfloats(Floats x) {
  const __m512i bits = _mm512_castps_si512(x.of);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.of, x.of, _CMP_UNORD_Q);
  return {_mm512_mask_or_epi32(nearest, is_nan, bits, _mm512_set1_epi32(0x400000))};
}
CHUNKRT_LANES __m256i upper_halves(Ints x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x.of, 16)); }
CHUNKRT_LANES void store_upper_halves(std::uint16_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), upper_halves(x));
}

CHUNKRT_LANES Floats load_bytes(const std::int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return to_floats({_mm512_cvtepi8_epi32(bytes)});
}
CHUNKRT_LANES Floats load_bytes(const std::int8_t* from, Rest rest) {
  return to_floats({_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(rest.of, from))});
}
CHUNKRT_LANES void store_bytes(std::int8_t* to, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.of));
}
CHUNKRT_LANES void store_bytes(std::int8_t* to, Ints x, Rest rest) {
  _mm512_mask_cvtepi32_storeu_epi8(to, rest.of, x.of);
}

CHUNKRT_LANES Floats byte_of_words(const void* words, std::size_t byte) {
  const __m128i to_top = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * byte));
  const Ints top = {_mm512_sll_epi32(_mm512_loadu_si512(words), to_top)};
  return to_floats(shift_right<24>(top));
}
CHUNKRT_LANES Floats four_bits_of_words(const void* words, std::size_t bit) {
  const __m128i to_bottom = _mm_cvtsi32_si128(static_cast<int>(bit));
  const Ints bottom = {_mm512_srl_epi32(_mm512_loadu_si512(words), to_bottom)};
  return to_floats(bottom & all_ints(15));
}

constexpr std::size_t kTransposedRows = 16;

// Four perfect shuffles transpose sixteen rows: each shuffle interleaves row i with row i + 8.
CHUNKRT_LANES void transpose(const float* const (&rows)[kTransposedRows], std::size_t column,
                             std::size_t count, float* out, std::size_t stride) {
  const __mmask16 lanes = Rest(count < 16 ? count : 16).of;
  const __m512i interleave_low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i interleave_high =
      _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  __m512 tile[2][16];
  for (std::size_t i = 0; i < 16; ++i) tile[0][i] = _mm512_maskz_loadu_ps(lanes, rows[i] + column);
  for (std::size_t step = 0; step < 4; ++step) {
    const __m512* from = tile[step % 2];
    __m512* to = tile[1 - step % 2];
    for (std::size_t i = 0; i < 8; ++i) {
      to[2 * i] = _mm512_permutex2var_ps(from[i], interleave_low, from[i + 8]);
      to[2 * i + 1] = _mm512_permutex2var_ps(from[i], interleave_high, from[i + 8]);
    }
  }
  for (std::size_t i = 0; i < 16; ++i) {
    if (lanes >> i & 1) _mm512_storeu_ps(out + i * stride, tile[0][i]);
  }
}

// Six rows of two vectors.
constexpr std::size_t kProductRows = 6, kProductVectors = 2;

constexpr std::size_t kPairRows = 8, kPairVectors = 2;

}  // namespace
}  // namespace chunkrt

#include "kernels/lanes/products.h"
