// attention in bfloat16 with AVX-512: VDPBF16PS adds the products of 16 pairs to 16 sums.
#include <bit>

#include "kernels/attention/byte_quads_avx512.h"
#include "kernels/attention/pair_products.h"
#include "kernels/attention/seen_scores.h"
#include "kernels/attention/tiles.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

// One instruction adds both products of a pair, and treats subnormal numbers as 0.
struct DotPairs {
  using Operand = Ints;
  static constexpr std::size_t kRows = 6, kVectors = 4;  // 24 of 32 registers
  static constexpr bool kAreBytes = false;

  CHUNKRT_LANES static Operand load(const std::uint16_t* pairs) { return load_ints(pairs); }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* pair) { return broadcast_word(pair); }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    return {_mm512_dpbf16_ps(sum.of, std::bit_cast<__m512bh>(right.of), std::bit_cast<__m512bh>(left.of))};
  }
};

// 2^t for t <= 0, with a relative error below 2^-13; 0 for -inf. A polynomial of the fraction of t, which is
// in [0, 1], times 2 to its floor.
CHUNKRT_LANES Floats power_of_two(Floats t) {
  const Floats fraction = {_mm512_reduce_ps(t.of, _MM_FROUND_TO_NEG_INF)};
  Floats p = multiply_add(all(0.07706702f), fraction, all(0.22764501f));
  p = multiply_add(p, fraction, all(0.69511676f));
  p = multiply_add(p, fraction, all(1.0f));
  return {_mm512_scalef_ps(p.of, t.of)};
}

// Lane i is the combination of all lanes of vector i, in the order of sum(Floats).
template <typename Combine>
CHUNKRT_LANES Floats combine_each(const Floats (&vectors)[kLanes], Combine combine) {
  Floats eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < 8; ++i) {
    const __m512 x = vectors[i].of, y = vectors[i + 8].of;
    eight[i] = combine(Floats{_mm512_shuffle_f32x4(x, y, 0x44)}, Floats{_mm512_shuffle_f32x4(x, y, 0xee)});
  }
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 4; ++i) {
    const __m512 x = eight[i].of, y = eight[i + 4].of;
    four[i] = combine(Floats{_mm512_shuffle_f32x4(x, y, 0x88)}, Floats{_mm512_shuffle_f32x4(x, y, 0xdd)});
  }
#pragma GCC unroll 2
  for (std::size_t i = 0; i < 2; ++i) {
    const __m512 x = four[i].of, y = four[i + 2].of;
    two[i] = combine(Floats{_mm512_shuffle_ps(x, y, 0x44)}, Floats{_mm512_shuffle_ps(x, y, 0xee)});
  }
  const __m512 x = two[0].of, y = two[1].of;
  const Floats one = combine(Floats{_mm512_shuffle_ps(x, y, 0x88)}, Floats{_mm512_shuffle_ps(x, y, 0xdd)});
  const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0);
  return {_mm512_permutexvar_ps(order, one.of)};
}

// Sets the scores of keys that a row does not see to -inf.
void hide_scores(const ScoredRows& rows, std::size_t row) {
  float* const scores = rows.scores + row * kKeysPerBlock;
  for (std::size_t key = 0; key < kKeysPerBlock; key += kLanes) {
    store(scores + key, load_seen(scores, key, rows.first[row], rows.visible[row]));
  }
}

// The maximum of a row's scores, in any lane. A NaN may be lost; the row's sum of weights then is a NaN.
CHUNKRT_LANES Floats largest_scores(const float* scores) {
  static_assert(kKeysPerBlock == 4 * kLanes);
  return max(max(load(scores), load(scores + kLanes)),
             max(load(scores + 2 * kLanes), load(scores + 3 * kLanes)));
}

// Converts the scores of a row to weights, and returns 16 partial sums.
CHUNKRT_LANES Floats weigh_row(const float* scores, float maximum, std::uint16_t* weights) {
  const Floats scale = all(kLog2E), largest = all(maximum);
  Floats sums = all(0.0f);
#pragma GCC unroll 2
  for (std::size_t key = 0; key < kKeysPerBlock; key += 2 * kLanes) {
    const Floats low = power_of_two((load(scores + key) - largest) * scale);
    const Floats high = power_of_two((load(scores + key + kLanes) - largest) * scale);
    const Ints both = {std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high.of, low.of))};
    _mm512_storeu_si512(weights + key, both.of);
    sums = DotPairs::add(both, all_ints(0x3f803f80), sums);  // times 1
  }
  return sums;
}

// Weighs up to 16 rows from `begin` on. If IsWhole, these are 16 rows that see all keys of the block.
template <bool IsWhole>
void weigh_sixteen(const ScoredRows& rows, std::size_t begin, std::size_t count) {
  const Rest rest(count);
  float* const scores = rows.scores + begin * kKeysPerBlock;
  std::uint16_t* const weights = rows.weights + begin * kKeysPerBlock;
  Floats found[kLanes];
  std::uint32_t seeing = IsWhole ? 0xffffu : 0u;
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kLanes; ++i) {
    if (IsWhole || (i < count && rows.first[begin + i] < rows.visible[begin + i])) {
      if (!IsWhole) hide_scores(rows, begin + i);
      seeing |= 1u << i;
      found[i] = largest_scores(scores + i * kKeysPerBlock);
    } else {
      found[i] = all(-INFINITY);
    }
  }
  const Floats old_maximum = load(rows.maxima + begin, rest);
  const Floats maximum = max(combine_each(found, [](Floats x, Floats y) { return max(x, y); }), old_maximum);
  const Floats rescale =
      select(Mask{static_cast<__mmask16>(seeing)}, exp_of_nonpositive(old_maximum - maximum), all(1.0f));
  store(rows.maxima + begin, maximum, rest);
  float maxima[kLanes], factors[kLanes];
  store(maxima, maximum);
  store(factors, rescale);
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kLanes; ++i) {
    if (IsWhole || (seeing >> i & 1u) != 0) {
      found[i] = weigh_row(scores + i * kKeysPerBlock, maxima[i], weights + i * kKeysPerBlock);
    } else {
      if (i < count) std::memset(weights + i * kKeysPerBlock, 0, kKeysPerBlock * sizeof(*weights));
      found[i] = all(0.0f);
    }
  }
  const Floats sums = combine_each(found, [](Floats x, Floats y) { return x + y; });
  store(rows.sums + begin, multiply_add(load(rows.sums + begin, rest), rescale, sums), rest);
  for (std::uint32_t left = seeing & ~static_cast<std::uint32_t>(
                                         _mm512_cmp_ps_mask(rescale.of, _mm512_set1_ps(1.0f), _CMP_EQ_OQ));
       left != 0; left &= left - 1) {
    const auto i = static_cast<std::size_t>(std::countr_zero(left));
    float* const out = rows.outs + (begin + i) * rows.columns;
    for (std::size_t d = 0; d < rows.columns; d += kLanes) store(out + d, load(out + d) * all(factors[i]));
  }
}

void weigh_rows_by_pairs(const ScoredRows& rows) {
  for (std::size_t row = 0; rows.soft_cap > 0.0f && row < rows.num_rows; ++row) {
    if (rows.first[row] < rows.visible[row]) {
      cap_scores(rows.scores + row * kKeysPerBlock, rows.first[row], rows.visible[row], rows.soft_cap);
    }
  }
  for (std::size_t begin = 0; begin < rows.num_rows; begin += kLanes) {
    const std::size_t count = smaller(kLanes, rows.num_rows - begin);
    if (rows.is_whole && count == kLanes) {
      weigh_sixteen<true>(rows, begin, count);
    } else {
      weigh_sixteen<false>(rows, begin, count);
    }
  }
}

void round_in_hardware(const float* values, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const auto rounded = std::bit_cast<__m256i>(_mm512_cvtneps_pbh(load(values + i).of));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), rounded);
  }
}

}  // namespace

TileOperations tile_operations_avx512bf16() {
  TileOperations operations = tile_operations_avx512vnni();
  operations.round = round_in_hardware;
  operations.weigh = weigh_rows_by_pairs;
  return operations;
}

void attend_f32_bf16_cache_avx512bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                      float* scratch) {
  static const TileOperations operations = tile_operations_avx512bf16();
  attend_in_bfloat<PairProducts<DotPairs>>(args, begin, end, scratch, operations);
}

void attend_f32_s8_bf16_cache_avx512bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                         float* scratch) {
  static const TileOperations operations = tile_operations_avx512bf16();
  attend_in_bfloat<PairProducts<DotPairs, ByteQuads>>(args, begin, end, scratch, operations);
}

}  // namespace chunkrt
