// attention in bfloat16 with AVX-512: VDPBF16PS adds the products of 16 pairs to 16 sums.
#include <cmath>

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

  CHUNKRT_LANES static Operand load(const std::uint16_t* pairs) { return load_ints(pairs); }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* pair) {
    int both;
    std::memcpy(&both, pair, sizeof(both));
    return all_ints(both);
  }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    return {_mm512_dpbf16_ps(sum.of, std::bit_cast<__m512bh>(right.of), std::bit_cast<__m512bh>(left.of))};
  }
};

constexpr std::size_t kVectorsPerBlock = kKeysPerBlock / kLanes;

// 2^t for t <= 0, with a relative error below 2^-13; 0 for -inf. A polynomial of the fraction of t, which is
// in [0, 1), times 2 to its floor.
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
  const Floats one =
      combine(Floats{_mm512_shuffle_ps(x, y, 0x88)}, Floats{_mm512_shuffle_ps(x, y, 0xdd)});
  const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0);
  return {_mm512_permutexvar_ps(order, one.of)};
}

// Up to 16 rows of a block.
class SixteenRows {
 public:
  SixteenRows(const ScoredRows& rows, std::size_t begin, std::size_t end)
      : rows_(rows), begin_(begin), count_(end - begin) {}

  void weigh() const {
    Floats maxima[kLanes], sums[kLanes];
    std::uint32_t seen = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      maxima[i] = find_maximum(i);
      seen |= static_cast<std::uint32_t>(sees(i)) << i;
    }
    for (std::size_t i = count_; i < kLanes; ++i) maxima[i] = all(-INFINITY);
    const Rest rest(count_);
    const Floats old_maximum = load(rows_.maxima + begin_, rest);
    const Floats maximum =
        max(combine_each(maxima, [](Floats x, Floats y) { return max(x, y); }), old_maximum);
    const Floats rescale = select(Mask{static_cast<__mmask16>(seen)},
                                  exp_of_nonpositive(old_maximum - maximum), all(1.0f));
    store(rows_.maxima + begin_, maximum, rest);
    float logarithms[kLanes], factors[kLanes];
    store(logarithms, maximum * all(kLog2E));
    store(factors, rescale);
    for (std::size_t i = 0; i < count_; ++i) sums[i] = weigh_row(i, logarithms[i]);
    for (std::size_t i = count_; i < kLanes; ++i) sums[i] = all(0.0f);
    store(rows_.sums + begin_,
          multiply_add(load(rows_.sums + begin_, rest), rescale,
                       combine_each(sums, [](Floats x, Floats y) { return x + y; })),
          rest);
    for (std::size_t i = 0; i < count_; ++i) {
      if (factors[i] == 1.0f) continue;
      float* const out = rows_.outs + (begin_ + i) * rows_.columns;
      for (std::size_t d = 0; d < rows_.columns; d += kLanes) store(out + d, load(out + d) * all(factors[i]));
    }
  }

 private:
  bool sees(std::size_t i) const { return rows_.first[begin_ + i] < rows_.visible[begin_ + i]; }
  bool sees_all(std::size_t i) const {
    return rows_.first[begin_ + i] == 0 && rows_.visible[begin_ + i] == kKeysPerBlock;
  }
  float* scores(std::size_t i) const { return rows_.scores + (begin_ + i) * kKeysPerBlock; }
  Floats load_score(std::size_t i, std::size_t key) const {
    return load_seen(scores(i), key, rows_.first[begin_ + i], rows_.visible[begin_ + i]);
  }

  // The maximum of a row's visible scores, in any lane; invisible ones become -inf.
  CHUNKRT_LANES Floats find_maximum(std::size_t i) const {
    float* const row = scores(i);
    if (!sees_all(i)) {
      if (!sees(i)) return all(-INFINITY);
      if (rows_.soft_cap > 0.0f) {
        cap_scores(row, rows_.first[begin_ + i], rows_.visible[begin_ + i], rows_.soft_cap);
      }
      for (std::size_t key = 0; key < kKeysPerBlock; key += kLanes) store(row + key, load_score(i, key));
    } else if (rows_.soft_cap > 0.0f) {
      cap_scores(row, 0, kKeysPerBlock, rows_.soft_cap);
    }
    static_assert(kVectorsPerBlock == 4);
    // The second operand of max is the result if one is a NaN.
    const Floats none = all(-INFINITY);
    const Floats first = max(load(row + kLanes), max(load(row), none));
    const Floats second = max(load(row + 3 * kLanes), max(load(row + 2 * kLanes), none));
    return max(first, second);
  }

  // Converts the scores of a row to weights, and returns 16 partial sums.
  CHUNKRT_LANES Floats weigh_row(std::size_t i, float logarithm) const {
    std::uint16_t* const weights = rows_.weights + (begin_ + i) * kKeysPerBlock;
    const float* const row = scores(i);
    if (!sees(i)) {
      std::memset(weights, 0, kKeysPerBlock * sizeof(*weights));
      return all(0.0f);
    }
    const Floats scale = all(kLog2E), largest = all(logarithm);
    const Ints ones = all_ints(0x3f803f80);
    Floats sums = all(0.0f);
#pragma GCC unroll 2
    for (std::size_t key = 0; key < kKeysPerBlock; key += 2 * kLanes) {
      const Floats low = power_of_two(multiply_subtract(load(row + key), scale, largest));
      const Floats high = power_of_two(multiply_subtract(load(row + key + kLanes), scale, largest));
      const Ints both = {std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high.of, low.of))};
      _mm512_storeu_si512(weights + key, both.of);
      sums = DotPairs::add(both, ones, sums);
    }
    return sums;
  }

  const ScoredRows& rows_;
  const std::size_t begin_, count_;
};

void round_in_hardware(const float* values, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const auto rounded = std::bit_cast<__m256i>(_mm512_cvtneps_pbh(load(values + i).of));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), rounded);
  }
}

void weigh_rows_by_pairs(const ScoredRows& rows) {
  for (std::size_t begin = 0; begin < rows.num_rows; begin += kLanes) {
    const std::size_t end = begin + kLanes < rows.num_rows ? begin + kLanes : rows.num_rows;
    SixteenRows(rows, begin, end).weigh();
  }
}

}  // namespace

void attend_f32_bf16_cache_avx512bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                      float* scratch) {
  static const TileOperations operations = [] {
    TileOperations common = tile_operations_avx512vnni();
    common.round = round_in_hardware;
    common.weigh = weigh_rows_by_pairs;
    return common;
  }();
  attend_in_bfloat<PairProducts<DotPairs>>(args, begin, end, scratch, operations);
}

}  // namespace chunkrt
