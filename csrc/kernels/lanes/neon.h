// Vectors of 16 lanes in four NEON registers; lanes.h includes this header, and avx2.h describes the
// operations.
#pragma once

#include <arm_neon.h>

#define CHUNKRT_NAME(kernel) kernel##_neon

namespace chunkrt {
namespace {

struct Floats {
  float32x4_t of[4];
};

struct Ints {
  int32x4_t of[4];
};

struct Mask {
  uint32x4_t of[4];
};

constexpr bool kHasMasks = false;

class Rest {
 public:
  CHUNKRT_LANES explicit Rest(std::size_t count) : count_(count) {}
  CHUNKRT_LANES std::size_t count() const { return count_; }

 private:
  std::size_t count_;
};

// A result whose registers are operation(registers of the operands).
template <typename Result, typename Operation, typename... Operands>
CHUNKRT_LANES Result each(Operation operation, Operands... x) {
  return {{operation(x.of[0]...), operation(x.of[1]...), operation(x.of[2]...), operation(x.of[3]...)}};
}

CHUNKRT_LANES Floats all(float x) {
  const float32x4_t four = vdupq_n_f32(x);
  return {{four, four, four, four}};
}
CHUNKRT_LANES Ints all_ints(int x) {
  const int32x4_t four = vdupq_n_s32(x);
  return {{four, four, four, four}};
}

CHUNKRT_LANES Floats load(const float* from) {
  return {{vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)}};
}
CHUNKRT_LANES Ints load_ints(const void* from) {
  const auto* const bytes = static_cast<const std::uint8_t*>(from);
  const auto four = [=](std::size_t i) { return vreinterpretq_s32_u8(vld1q_u8(bytes + 16 * i)); };
  return {{four(0), four(1), four(2), four(3)}};
}
CHUNKRT_LANES void store(float* to, Floats x) {
  vst1q_f32(to, x.of[0]);
  vst1q_f32(to + 4, x.of[1]);
  vst1q_f32(to + 8, x.of[2]);
  vst1q_f32(to + 12, x.of[3]);
}
CHUNKRT_LANES Floats load(const float* from, Rest rest) {
  const auto four = [&](std::size_t begin) {
    if (begin + 4 <= rest.count()) return vld1q_f32(from + begin);
    float32x4_t x = vdupq_n_f32(0.0f);
    if (begin < rest.count()) x = vld1q_lane_f32(from + begin, x, 0);
    if (begin + 1 < rest.count()) x = vld1q_lane_f32(from + begin + 1, x, 1);
    if (begin + 2 < rest.count()) x = vld1q_lane_f32(from + begin + 2, x, 2);
    return x;
  };
  return {{four(0), four(4), four(8), four(12)}};
}
CHUNKRT_LANES void store(float* to, Floats x, Rest rest) {
  const auto four = [&](std::size_t begin, float32x4_t part) {
    if (begin + 4 <= rest.count()) return vst1q_f32(to + begin, part);
    if (begin < rest.count()) vst1q_lane_f32(to + begin, part, 0);
    if (begin + 1 < rest.count()) vst1q_lane_f32(to + begin + 1, part, 1);
    if (begin + 2 < rest.count()) vst1q_lane_f32(to + begin + 2, part, 2);
  };
  four(0, x.of[0]);
  four(4, x.of[1]);
  four(8, x.of[2]);
  four(12, x.of[3]);
}
template <std::size_t Count>
CHUNKRT_LANES void store_at_least(float* to, Floats x) {
  vst1q_f32(to, x.of[0]);
  if constexpr (Count > 4) vst1q_f32(to + 4, x.of[1]);
  if constexpr (Count > 8) vst1q_f32(to + 8, x.of[2]);
  if constexpr (Count > 12) vst1q_f32(to + 12, x.of[3]);
}

CHUNKRT_LANES Floats operator+(Floats x, Floats y) { return CHUNKRT_EACH(Floats, vaddq_f32, x, y); }
CHUNKRT_LANES Floats operator-(Floats x, Floats y) { return CHUNKRT_EACH(Floats, vsubq_f32, x, y); }
CHUNKRT_LANES Floats operator*(Floats x, Floats y) { return CHUNKRT_EACH(Floats, vmulq_f32, x, y); }
CHUNKRT_LANES Floats operator/(Floats x, Floats y) { return CHUNKRT_EACH(Floats, vdivq_f32, x, y); }
CHUNKRT_LANES Floats operator-(Floats x) { return CHUNKRT_EACH(Floats, vnegq_f32, x); }
CHUNKRT_LANES Floats multiply_add(Floats x, Floats y, Floats z) {
  return CHUNKRT_EACH(Floats, vfmaq_f32, z, x, y);
}
CHUNKRT_LANES Floats multiply_subtract(Floats x, Floats y, Floats z) { return multiply_add(x, y, -z); }
CHUNKRT_LANES Floats min(Floats x, Floats y) { return CHUNKRT_EACH(Floats, vminq_f32, x, y); }
CHUNKRT_LANES Floats max(Floats x, Floats y) { return CHUNKRT_EACH(Floats, vmaxq_f32, x, y); }
CHUNKRT_LANES Floats absolute(Floats x) { return CHUNKRT_EACH(Floats, vabsq_f32, x); }
CHUNKRT_LANES Floats negative(Floats x) { return -absolute(x); }
CHUNKRT_LANES Floats with_sign(Floats magnitude, Floats x) {
  return each<Floats>([](float32x4_t m, float32x4_t s) { return vbslq_f32(vdupq_n_u32(0x80000000u), s, m); },
                      magnitude, x);
}
CHUNKRT_LANES Floats round(Floats x) { return CHUNKRT_EACH(Floats, vrndnq_f32, x); }
CHUNKRT_LANES Ints to_ints(Floats x) { return CHUNKRT_EACH(Ints, vcvtnq_s32_f32, x); }
CHUNKRT_LANES Floats to_floats(Ints x) { return CHUNKRT_EACH(Floats, vcvtq_f32_s32, x); }
CHUNKRT_LANES Ints bits_of(Floats x) { return CHUNKRT_EACH(Ints, vreinterpretq_s32_f32, x); }
CHUNKRT_LANES Floats from_bits(Ints x) { return CHUNKRT_EACH(Floats, vreinterpretq_f32_s32, x); }

CHUNKRT_LANES Ints operator+(Ints x, Ints y) { return CHUNKRT_EACH(Ints, vaddq_s32, x, y); }
CHUNKRT_LANES Ints operator-(Ints x, Ints y) { return CHUNKRT_EACH(Ints, vsubq_s32, x, y); }
CHUNKRT_LANES Ints operator&(Ints x, Ints y) { return CHUNKRT_EACH(Ints, vandq_s32, x, y); }
CHUNKRT_LANES Ints max(Ints x, Ints y) { return CHUNKRT_EACH(Ints, vmaxq_s32, x, y); }
template <int Bits>
CHUNKRT_LANES Ints shift_left(Ints x) {
  return each<Ints>([](int32x4_t v) { return vshlq_n_s32(v, Bits); }, x);
}
template <int Bits>
CHUNKRT_LANES Ints shift_right(Ints x) {
  return each<Ints>([](int32x4_t v) { return vshrq_n_s32(v, Bits); }, x);
}

CHUNKRT_LANES Floats scale_by_power(Floats p, Floats n) {
  return from_bits(bits_of(p) + shift_left<23>(CHUNKRT_EACH(Ints, vcvtq_s32_f32, n)));
}

CHUNKRT_LANES Mask less(Floats x, Floats y) { return CHUNKRT_EACH(Mask, vcltq_f32, x, y); }
CHUNKRT_LANES Mask magnitude_less(Floats x, Floats y) { return CHUNKRT_EACH(Mask, vcaltq_f32, x, y); }
CHUNKRT_LANES Mask is_number(Floats x) { return CHUNKRT_EACH(Mask, vceqq_f32, x, x); }
CHUNKRT_LANES Mask operator&(Mask x, Mask y) { return CHUNKRT_EACH(Mask, vandq_u32, x, y); }
CHUNKRT_LANES Mask lanes_between(int begin, int end) {
  const std::int32_t first[4] = {0, 1, 2, 3};
  const auto between = [=](int32x4_t lanes) {
    return vandq_u32(vcgeq_s32(lanes, vdupq_n_s32(begin)), vcltq_s32(lanes, vdupq_n_s32(end)));
  };
  const int32x4_t lanes = vld1q_s32(first);
  return {{between(lanes), between(vaddq_s32(lanes, vdupq_n_s32(4))),
           between(vaddq_s32(lanes, vdupq_n_s32(8))), between(vaddq_s32(lanes, vdupq_n_s32(12)))}};
}
CHUNKRT_LANES std::uint32_t bits(Mask mask) {
  const std::uint32_t of_lanes[16] = {1,      2,      4,       8,       1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                      1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  uint32x4_t sum = vandq_u32(mask.of[0], vld1q_u32(of_lanes));
  sum = vorrq_u32(sum, vandq_u32(mask.of[1], vld1q_u32(of_lanes + 4)));
  sum = vorrq_u32(sum, vandq_u32(mask.of[2], vld1q_u32(of_lanes + 8)));
  sum = vorrq_u32(sum, vandq_u32(mask.of[3], vld1q_u32(of_lanes + 12)));
  return vaddvq_u32(sum);
}
CHUNKRT_LANES bool any_of(Mask mask) {
  const uint32x4_t four = vorrq_u32(vorrq_u32(mask.of[0], mask.of[1]), vorrq_u32(mask.of[2], mask.of[3]));
  return vmaxvq_u32(four) != 0;
}
CHUNKRT_LANES bool all_of(Mask mask) {
  const uint32x4_t four = vandq_u32(vandq_u32(mask.of[0], mask.of[1]), vandq_u32(mask.of[2], mask.of[3]));
  return vminvq_u32(four) != 0;
}
CHUNKRT_LANES Floats select(Mask mask, Floats x, Floats y) {
  return CHUNKRT_EACH(Floats, vbslq_f32, mask, x, y);
}
CHUNKRT_LANES Floats keep(Mask mask, Floats x) {
  return each<Floats>(
      [](uint32x4_t m, float32x4_t v) {
        return vreinterpretq_f32_u32(vandq_u32(m, vreinterpretq_u32_f32(v)));
      },
      mask, x);
}
CHUNKRT_LANES Floats zero_if_less(Floats x, Floats limit, Floats y) {
  return each<Floats>(
      [](uint32x4_t m, float32x4_t v) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), m));
      },
      less(x, limit), y);
}

template <int Distance>
CHUNKRT_LANES Floats exchange(Floats x) {
  if constexpr (Distance == 1) return CHUNKRT_EACH(Floats, vrev64q_f32, x);
  if constexpr (Distance == 2) {
    return each<Floats>([](float32x4_t four) { return vextq_f32(four, four, 2); }, x);
  }
  if constexpr (Distance == 4) return {{x.of[1], x.of[0], x.of[3], x.of[2]}};
  if constexpr (Distance == 8) return {{x.of[2], x.of[3], x.of[0], x.of[1]}};
}

CHUNKRT_LANES float square_root(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }

CHUNKRT_LANES float sum(Floats x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.of[0], x.of[2]), vaddq_f32(x.of[1], x.of[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
CHUNKRT_LANES float largest(Floats x) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.of[0], x.of[1]), vmaxq_f32(x.of[2], x.of[3])));
}
CHUNKRT_LANES std::int32_t sum(Ints x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.of[0], x.of[1]), vaddq_s32(x.of[2], x.of[3])));
}
CHUNKRT_LANES std::int32_t largest(Ints x) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.of[0], x.of[1]), vmaxq_s32(x.of[2], x.of[3])));
}

CHUNKRT_LANES Floats load_halves(const std::uint16_t* from) {
  const auto widen = [](uint16x4_t four) { return vcvt_f32_f16(vreinterpret_f16_u16(four)); };
  return {{widen(vld1_u16(from)), widen(vld1_u16(from + 4)), widen(vld1_u16(from + 8)),
           widen(vld1_u16(from + 12))}};
}
CHUNKRT_LANES void store_halves(std::uint16_t* to, Floats x) {
  const auto narrow = [](float32x4_t four) { return vreinterpret_u16_f16(vcvt_f16_f32(four)); };
  vst1_u16(to, narrow(x.of[0]));
  vst1_u16(to + 4, narrow(x.of[1]));
  vst1_u16(to + 8, narrow(x.of[2]));
  vst1_u16(to + 12, narrow(x.of[3]));
}

CHUNKRT_LANES Ints to_bfloats(Floats x) {
  const auto round_one = [](float32x4_t values) {
    const uint32x4_t bits = vreinterpretq_u32_f32(values);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t nearest = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vreinterpretq_s32_u32(vbslq_u32(vceqq_f32(values, values), nearest, quiet));
  };
  return each<Ints>(round_one, x);
}
CHUNKRT_LANES uint16x8_t upper_halves(int32x4_t low, int32x4_t high) {
  return vuzp2q_u16(vreinterpretq_u16_s32(low), vreinterpretq_u16_s32(high));
}
CHUNKRT_LANES void store_upper_halves(std::uint16_t* to, Ints x) {
  vst1q_u16(to, upper_halves(x.of[0], x.of[1]));
  vst1q_u16(to + 8, upper_halves(x.of[2], x.of[3]));
}

CHUNKRT_LANES Floats load_bytes(const std::int8_t* from) {
  const int8x16_t bytes = vld1q_s8(from);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return to_floats({{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),
                     vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}});
}
CHUNKRT_LANES void store_bytes(std::int8_t* to, Ints x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.of[0]), vmovn_s32(x.of[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(x.of[2]), vmovn_s32(x.of[3]));
  vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

CHUNKRT_LANES Floats byte_of_words(const void* words, std::size_t byte) {
  const auto* const bytes = static_cast<const std::int8_t*>(words);
  const int32x4_t to_top = vdupq_n_s32(24 - 8 * static_cast<int>(byte));
  const auto top = [&](std::size_t i) {
    return vshlq_s32(vreinterpretq_s32_s8(vld1q_s8(bytes + 16 * i)), to_top);
  };
  return to_floats(shift_right<24>({{top(0), top(1), top(2), top(3)}}));
}
CHUNKRT_LANES Floats four_bits_of_words(const void* words, std::size_t bit) {
  const auto* const bytes = static_cast<const std::uint8_t*>(words);
  const int32x4_t to_bottom = vdupq_n_s32(-static_cast<int>(bit));
  const auto bottom = [&](std::size_t i) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(bytes + 16 * i)), to_bottom));
  };
  const Ints four_words = {{bottom(0), bottom(1), bottom(2), bottom(3)}};
  return to_floats(four_words & all_ints(15));
}

constexpr std::size_t kTransposedRows = 4;

CHUNKRT_LANES void transpose(const float* const (&rows)[kTransposedRows], std::size_t column,
                             std::size_t count, float* out, std::size_t stride) {
  if (count < 4) {
    for (std::size_t d = 0; d < count; ++d) {
      for (std::size_t i = 0; i < 4; ++i) out[d * stride + i] = rows[i][column + d];
    }
    return;
  }
  const float32x4_t a = vld1q_f32(rows[0] + column), b = vld1q_f32(rows[1] + column);
  const float32x4_t c = vld1q_f32(rows[2] + column), d = vld1q_f32(rows[3] + column);
  const float64x2_t ab_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
  const float64x2_t ab_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  const float64x2_t cd_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
  const float64x2_t cd_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
  vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(ab_even, cd_even)));
  vst1q_f32(out + stride, vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd)));
  vst1q_f32(out + 2 * stride, vreinterpretq_f32_f64(vtrn2q_f64(ab_even, cd_even)));
  vst1q_f32(out + 3 * stride, vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd)));
}

// Four rows of a vector are 16 of 32 registers.
constexpr std::size_t kProductRows = 4, kProductVectors = 1;

constexpr std::size_t kPairRows = 4, kPairVectors = 1;

// sums[m][v] += factors[m][Lane] * vectors[v].
template <int Lane, std::size_t M, std::size_t V, typename Load>
CHUNKRT_LANES void add_products_of_lane(Floats (&sums)[M][V], const float32x4_t (&factors)[M],
                                        const float* vectors, Load load_vector) {
#pragma GCC unroll 2
  for (std::size_t v = 0; v < V; ++v) {
    const Floats vector = load_vector(vectors + v * 16, v);
#pragma GCC unroll 4
    for (std::size_t m = 0; m < M; ++m) {
      const float32x4_t four = factors[m];
      sums[m][v] =
          each<Floats>([=](float32x4_t sum, float32x4_t x) { return vfmaq_laneq_f32(sum, x, four, Lane); },
                       sums[m][v], vector);
    }
  }
}

// The sums of products.h, with four factors in a register.
template <std::size_t M, std::size_t V, typename Load>
CHUNKRT_LANES void add_products(Floats (&sums)[M][V], const float* factors, std::size_t factor_stride,
                                const float* vectors, std::size_t vector_stride, std::size_t count,
                                Load load_vector) {
  float32x4_t four[M];
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4, vectors += 4 * vector_stride) {
#pragma GCC unroll 4
    for (std::size_t m = 0; m < M; ++m) four[m] = vld1q_f32(factors + m * factor_stride + i);
    add_products_of_lane<0>(sums, four, vectors, load_vector);
    add_products_of_lane<1>(sums, four, vectors + vector_stride, load_vector);
    add_products_of_lane<2>(sums, four, vectors + 2 * vector_stride, load_vector);
    add_products_of_lane<3>(sums, four, vectors + 3 * vector_stride, load_vector);
  }
  for (; i < count; ++i, vectors += vector_stride) {
#pragma GCC unroll 4
    for (std::size_t m = 0; m < M; ++m) four[m] = vdupq_n_f32(factors[m * factor_stride + i]);
    add_products_of_lane<0>(sums, four, vectors, load_vector);
  }
}

}  // namespace
}  // namespace chunkrt

#include "kernels/lanes/buffered.h"
