// Vectors of 16 lanes in two AVX2 registers; lanes.h includes this header.
#pragma once

#include <immintrin.h>

#define CHUNKRT_NAME(kernel) kernel##_avx2

namespace chunkrt {
namespace {

struct Floats {
  __m256 low, high;
};

struct Ints {
  __m256i low, high;
};

// True or false for each lane.
struct Mask {
  __m256 low, high;
};

// True if loads of the first lanes take no longer than other loads.
constexpr bool kHasMasks = false;

// The first lanes of a vector, at most 16.
class Rest {
 public:
  CHUNKRT_LANES explicit Rest(std::size_t count) : count_(static_cast<int>(count)) {}
  CHUNKRT_LANES std::size_t count() const { return static_cast<std::size_t>(count_); }
  CHUNKRT_LANES __m256i low() const { return first(count_); }
  CHUNKRT_LANES __m256i high() const { return first(count_ - 8); }

 private:
  CHUNKRT_LANES static __m256i first(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  int count_;
};

// A result whose registers are operation(registers of the operands).
template <typename Result, typename Operation, typename... Operands>
CHUNKRT_LANES Result each(Operation operation, Operands... x) {
  return {operation(x.low...), operation(x.high...)};
}

CHUNKRT_LANES Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
CHUNKRT_LANES Ints all_ints(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

CHUNKRT_LANES Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
// 16 words of four bytes, of any type.
CHUNKRT_LANES Ints load_ints(const void* from) {
  const auto* const words = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
CHUNKRT_LANES void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}

// Loads the lanes of `rest`, and 0 after them.
CHUNKRT_LANES Floats load(const float* from, Rest rest) {
  return {_mm256_maskload_ps(from, rest.low()), _mm256_maskload_ps(from + 8, rest.high())};
}
// A complete register is stored without a mask, because a masked store takes about twenty cycles on AMD's
// processors.
CHUNKRT_LANES void store(float* to, Floats x, Rest rest) {
  if (rest.count() >= 8) {
    _mm256_storeu_ps(to, x.low);
    if (rest.count() > 8) _mm256_maskstore_ps(to + 8, rest.high(), x.high);
  } else {
    _mm256_maskstore_ps(to, rest.low(), x.low);
  }
}

// Stores the first Count lanes, and possibly more.
template <std::size_t Count>
CHUNKRT_LANES void store_at_least(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  if constexpr (Count > 8) _mm256_storeu_ps(to + 8, x.high);
}

CHUNKRT_LANES Floats operator+(Floats x, Floats y) { return CHUNKRT_EACH(Floats, _mm256_add_ps, x, y); }
CHUNKRT_LANES Floats operator-(Floats x, Floats y) { return CHUNKRT_EACH(Floats, _mm256_sub_ps, x, y); }
CHUNKRT_LANES Floats operator*(Floats x, Floats y) { return CHUNKRT_EACH(Floats, _mm256_mul_ps, x, y); }
CHUNKRT_LANES Floats operator/(Floats x, Floats y) { return CHUNKRT_EACH(Floats, _mm256_div_ps, x, y); }
// x * y + z and x * y - z, rounded once.
CHUNKRT_LANES Floats multiply_add(Floats x, Floats y, Floats z) {
  return CHUNKRT_EACH(Floats, _mm256_fmadd_ps, x, y, z);
}
CHUNKRT_LANES Floats multiply_subtract(Floats x, Floats y, Floats z) {
  return CHUNKRT_EACH(Floats, _mm256_fmsub_ps, x, y, z);
}
// x is not a NaN; if y is one, the result is, too, except that min(y, x) and max(y, x) may be either.
CHUNKRT_LANES Floats min(Floats x, Floats y) { return CHUNKRT_EACH(Floats, _mm256_min_ps, x, y); }
CHUNKRT_LANES Floats max(Floats x, Floats y) { return CHUNKRT_EACH(Floats, _mm256_max_ps, x, y); }
CHUNKRT_LANES Floats operator-(Floats x) { return CHUNKRT_EACH(Floats, _mm256_xor_ps, x, all(-0.0f)); }
CHUNKRT_LANES Floats absolute(Floats x) { return CHUNKRT_EACH(Floats, _mm256_andnot_ps, all(-0.0f), x); }
// -|x|.
CHUNKRT_LANES Floats negative(Floats x) { return CHUNKRT_EACH(Floats, _mm256_or_ps, all(-0.0f), x); }
// A magnitude with the sign of x.
CHUNKRT_LANES Floats with_sign(Floats magnitude, Floats x) {
  const Floats sign = CHUNKRT_EACH(Floats, _mm256_and_ps, all(-0.0f), x);
  return CHUNKRT_EACH(Floats, _mm256_or_ps, magnitude, sign);
}
// The nearest integer, ties to even.
CHUNKRT_LANES Floats round(Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kNearest), _mm256_round_ps(x.high, kNearest)};
}
// The same as an int32, into which it fits.
CHUNKRT_LANES Ints to_ints(Floats x) { return CHUNKRT_EACH(Ints, _mm256_cvtps_epi32, round(x)); }
CHUNKRT_LANES Floats to_floats(Ints x) { return CHUNKRT_EACH(Floats, _mm256_cvtepi32_ps, x); }
CHUNKRT_LANES Ints bits_of(Floats x) { return CHUNKRT_EACH(Ints, _mm256_castps_si256, x); }
CHUNKRT_LANES Floats from_bits(Ints x) { return CHUNKRT_EACH(Floats, _mm256_castsi256_ps, x); }

CHUNKRT_LANES Ints operator+(Ints x, Ints y) { return CHUNKRT_EACH(Ints, _mm256_add_epi32, x, y); }
CHUNKRT_LANES Ints operator-(Ints x, Ints y) { return CHUNKRT_EACH(Ints, _mm256_sub_epi32, x, y); }
CHUNKRT_LANES Ints operator&(Ints x, Ints y) { return CHUNKRT_EACH(Ints, _mm256_and_si256, x, y); }
CHUNKRT_LANES Ints max(Ints x, Ints y) { return CHUNKRT_EACH(Ints, _mm256_max_epi32, x, y); }
template <int Bits>
CHUNKRT_LANES Ints shift_left(Ints x) {
  return {_mm256_slli_epi32(x.low, Bits), _mm256_slli_epi32(x.high, Bits)};
}
// Fills with the sign.
template <int Bits>
CHUNKRT_LANES Ints shift_right(Ints x) {
  return {_mm256_srai_epi32(x.low, Bits), _mm256_srai_epi32(x.high, Bits)};
}

// p * 2^n for an integer n and a normal result; p if both are NaN.
CHUNKRT_LANES Floats scale_by_power(Floats p, Floats n) {
  return from_bits(bits_of(p) + shift_left<23>(CHUNKRT_EACH(Ints, _mm256_cvtps_epi32, n)));
}

CHUNKRT_LANES Mask less(Floats x, Floats y) {
  return {_mm256_cmp_ps(x.low, y.low, _CMP_LT_OQ), _mm256_cmp_ps(x.high, y.high, _CMP_LT_OQ)};
}
// |x| < |y|.
CHUNKRT_LANES Mask magnitude_less(Floats x, Floats y) { return less(absolute(x), absolute(y)); }
CHUNKRT_LANES Mask is_number(Floats x) {
  return {_mm256_cmp_ps(x.low, x.low, _CMP_ORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_ORD_Q)};
}
CHUNKRT_LANES Mask operator&(Mask x, Mask y) { return CHUNKRT_EACH(Mask, _mm256_and_ps, x, y); }
// True for the lanes from `begin` to before `end`; both may be outside of the vector.
CHUNKRT_LANES Mask lanes_between(int begin, int end) {
  const auto between = [=](__m256i lanes) {
    const __m256i is_before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lanes);
    const __m256i is_before_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lanes);
    return _mm256_castsi256_ps(_mm256_andnot_si256(is_before, is_before_end));
  };
  return {between(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          between(_mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}
// One bit for each lane.
CHUNKRT_LANES std::uint32_t bits(Mask mask) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(mask.low) | _mm256_movemask_ps(mask.high) << 8);
}
CHUNKRT_LANES bool any_of(Mask mask) { return _mm256_movemask_ps(_mm256_or_ps(mask.low, mask.high)) != 0; }
CHUNKRT_LANES bool all_of(Mask mask) {
  return _mm256_movemask_ps(_mm256_and_ps(mask.low, mask.high)) == 0xff;
}
CHUNKRT_LANES Floats select(Mask mask, Floats x, Floats y) {
  return CHUNKRT_EACH(Floats, _mm256_blendv_ps, y, x, mask);
}
// x where the mask is true, otherwise 0.
CHUNKRT_LANES Floats keep(Mask mask, Floats x) { return CHUNKRT_EACH(Floats, _mm256_and_ps, mask, x); }
// 0 where x < limit, otherwise y, also for a NaN.
CHUNKRT_LANES Floats zero_if_less(Floats x, Floats limit, Floats y) {
  return CHUNKRT_EACH(Floats, _mm256_andnot_ps, less(x, limit), y);
}

// Lane i of the result is the lane of x whose number differs from i in the bit `Distance`: 1, 2, 4 or 8.
template <int Distance>
CHUNKRT_LANES Floats exchange(Floats x) {
  if constexpr (Distance == 1) return {_mm256_permute_ps(x.low, 0xb1), _mm256_permute_ps(x.high, 0xb1)};
  if constexpr (Distance == 2) return {_mm256_permute_ps(x.low, 0x4e), _mm256_permute_ps(x.high, 0x4e)};
  if constexpr (Distance == 4) {
    return {_mm256_permute2f128_ps(x.low, x.low, 1), _mm256_permute2f128_ps(x.high, x.high, 1)};
  }
  if constexpr (Distance == 8) return {x.high, x.low};
}

CHUNKRT_LANES float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// The sum in the order of norm.h.
CHUNKRT_LANES float sum(Floats x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
CHUNKRT_LANES float largest(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
CHUNKRT_LANES std::int32_t sum(Ints x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0b01001110));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0b10110001)));
}
CHUNKRT_LANES std::int32_t largest(Ints x) {
  const __m256i eight = _mm256_max_epi32(x.low, x.high);
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0b01001110));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0b10110001)));
}

// IEEE 754 binary16.
CHUNKRT_LANES Floats load_halves(const std::uint16_t* from) {
  const auto* const halves = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
CHUNKRT_LANES void store_halves(std::uint16_t* to, Floats x) {
  auto* const halves = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}

// The nearest bfloat16, in the upper half of each lane; the lower half is unspecified.
CHUNKRT_LANES Ints to_bfloats(Floats x) {
  const auto round_one = [](__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    return _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(nearest), _mm256_castsi256_ps(quiet), is_nan));
  };
  return each<Ints>(round_one, x);
}
CHUNKRT_LANES __m256i upper_halves(Ints x) {
  const __m256i halves = _mm256_packus_epi32(_mm256_srli_epi32(x.low, 16), _mm256_srli_epi32(x.high, 16));
  return _mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0));
}
CHUNKRT_LANES void store_upper_halves(std::uint16_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), upper_halves(x));
}

// int8.
CHUNKRT_LANES Floats load_bytes(const std::int8_t* from) {
  const auto* const bytes = reinterpret_cast<const __m128i*>(from);
  const __m128i low = _mm_loadl_epi64(bytes);
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8));
  return to_floats({_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)});
}
// The integers fit in int8.
CHUNKRT_LANES void store_bytes(std::int8_t* to, Ints x) {
  const __m256i words = _mm256_packs_epi32(x.low, x.high);  // fours of low, high, low, high
  const __m256i bytes = _mm256_packs_epi16(words, words);
  const __m256i fours = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(fours));
}

// One byte of each of 16 little-endian words, or four bits from `bit` on without a sign.
CHUNKRT_LANES Floats byte_of_words(const void* words, std::size_t byte) {
  const auto* const registers = static_cast<const __m256i*>(words);
  const __m128i to_top = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * byte));
  const Ints top = {_mm256_sll_epi32(_mm256_loadu_si256(registers), to_top),
                    _mm256_sll_epi32(_mm256_loadu_si256(registers + 1), to_top)};
  return to_floats(shift_right<24>(top));
}
CHUNKRT_LANES Floats four_bits_of_words(const void* words, std::size_t bit) {
  const auto* const registers = static_cast<const __m256i*>(words);
  const __m128i to_bottom = _mm_cvtsi32_si128(static_cast<int>(bit));
  const Ints bottom = {_mm256_srl_epi32(_mm256_loadu_si256(registers), to_bottom),
                       _mm256_srl_epi32(_mm256_loadu_si256(registers + 1), to_bottom)};
  return to_floats(bottom & all_ints(15));
}

constexpr std::size_t kTransposedRows = 8;

// Transposes 8 rows.
CHUNKRT_LANES void transpose_registers(__m256 (&rows)[8]) {
  __m256 pairs[8], quads[8];
  for (std::size_t i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (std::size_t i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
  }
  for (std::size_t i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

// Transposes `count` columns, or kTransposedRows, from `column` on, of kTransposedRows rows; adjacent rows of
// the result are `stride` apart.
CHUNKRT_LANES void transpose(const float* const (&rows)[kTransposedRows], std::size_t column,
                             std::size_t count, float* out, std::size_t stride) {
  if (count >= 8) {
    __m256 of[8];
    for (std::size_t i = 0; i < 8; ++i) of[i] = _mm256_loadu_ps(rows[i] + column);
    transpose_registers(of);
    for (std::size_t i = 0; i < 8; ++i) _mm256_storeu_ps(out + i * stride, of[i]);
    return;
  }
  for (std::size_t d = 0; d < count; ++d) {
    for (std::size_t i = 0; i < 8; ++i) out[d * stride + i] = rows[i][column + d];
  }
}

// The tile of sums of add_products that the registers hold: six rows of a vector are 12 of 16 registers.
constexpr std::size_t kProductRows = 6, kProductVectors = 1;

// The tile of sums whose products take two operands for each row and each vector.
constexpr std::size_t kPairRows = 4, kPairVectors = 1;

}  // namespace
}  // namespace chunkrt

#include "kernels/lanes/buffered.h"
#include "kernels/lanes/products.h"
