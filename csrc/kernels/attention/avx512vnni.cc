// attention with AVX-512: a tile of 6 queries by 32 keys, then by 32 columns; masks handle the remainders.
#include <immintrin.h>
#include <math.h>

#include <cstring>

#include "kernels/attention/blocked.h"
#include "kernels/attention/round_bfloat.h"
#include "kernels/attention/tile_operations.h"
#include "kernels/lanes_avx512.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kQueriesPerTile = 6;

void rope(const float* input, const float* cos, const float* sin, std::size_t head_dim,
          std::size_t rotary_dim, float scale, float* out) {
  const std::size_t half = rotary_dim / 2;
  const __m512 scales = _mm512_set1_ps(scale);
  for (std::size_t i = 0; i < half; i += kLanes) {
    const __mmask16 lanes = first_lanes(half - i);
    const __m512 first = _mm512_maskz_loadu_ps(lanes, input + i);
    const __m512 second = _mm512_maskz_loadu_ps(lanes, input + i + half);
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
    const __m512 roped_first = _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s));
    const __m512 roped_second = _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s));
    store_lanes(out + i, lanes, _mm512_mul_ps(roped_first, scales));
    store_lanes(out + i + half, lanes, _mm512_mul_ps(roped_second, scales));
  }
  for (std::size_t i = rotary_dim; i < head_dim; ++i) out[i] = input[i] * scale;
}

void narrow(const float* input, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = first_lanes(count - i);
    const __m512 values = _mm512_maskz_loadu_ps(lanes, input + i);
    _mm256_mask_storeu_epi16(out + i, lanes, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
}

void dequantize(const std::byte* row, std::size_t head_dim, const float* bias, float* out) {
  const auto* const values = reinterpret_cast<const std::int8_t*>(row);
  for (std::size_t i = 0, end; i < head_dim; i = end) {
    float scale;
    std::memcpy(&scale, row + head_dim + i / kInt8Group * sizeof(scale), sizeof(scale));
    end = head_dim - i < kInt8Group ? head_dim : i + kInt8Group;
    const __m512 scales = _mm512_set1_ps(scale);
    for (; i < end; i += kLanes) {
      const __mmask16 lanes = first_lanes(end - i);
      const __m512i integers = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, values + i));
      const __m512 added = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(lanes, bias + i);
      store_lanes(out + i, lanes, _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), scales, added));
    }
  }
}

// Four perfect shuffles transpose sixteen rows: each shuffle interleaves row i with row i + 8.
void transpose_16_by_16(const float* const* rows, std::size_t column, __mmask16 lanes, float* out) {
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
    if (lanes >> i & 1) _mm512_storeu_ps(out + i * kKeysPerBlock, tile[0][i]);
  }
}

// Fills num_keys columns, rounded up to a multiple of 32; the columns past num_keys are copies of the last
// key.
void transpose(const float* keys, std::size_t num_keys, std::size_t head_dim, float* out) {
  for (std::size_t key = 0; key < num_keys || key % 32 != 0; key += 16) {
    const float* rows[16];
    for (std::size_t i = 0; i < 16; ++i) {
      rows[i] = keys + (key + i < num_keys ? key + i : num_keys - 1) * head_dim;
    }
    for (std::size_t d = 0; d < head_dim; d += 16) {
      transpose_16_by_16(rows, d, first_lanes(head_dim - d), out + d * kKeysPerBlock + key);
    }
  }
}

__m512 exp_of_nonpositive(__m512 x) {
  const __m512 limit = _mm512_set1_ps(-kExpLimit);
  const __m512 clamped = _mm512_max_ps(limit, x);  // the operand order keeps a NaN in x
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(kLog2E)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r =
      _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Low), _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2High), clamped));
  __m512 p = _mm512_set1_ps(kExpCoefficients[4]);
  for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExpCoefficients[i]));
  p = _mm512_fmadd_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), r, _mm512_set1_ps(1.0f));
  const __mmask16 kept = _mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, p, n);
}

// Reduces 16 partial sums in the order of norm.h.
float horizontal_sum(__m512 x) {
  const __m256 high = _mm512_extractf32x8_ps(x, 1);
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// scores[q][key .. key + 31] of N queries.
template <std::size_t N>
void score(const KeyBlock& block, const float* queries, std::size_t key, float (*scores)[kKeysPerBlock]) {
  __m512 sums[N][2];
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) sums[q][0] = sums[q][1] = _mm512_setzero_ps();
  const float* keys = block.keys + key;
  for (std::size_t d = 0; d < block.head_dim; ++d, keys += kKeysPerBlock) {
    const __m512 low = _mm512_loadu_ps(keys), high = _mm512_loadu_ps(keys + kLanes);
#pragma GCC unroll 6
    for (std::size_t q = 0; q < N; ++q) {
      const __m512 query = _mm512_set1_ps(queries[q * block.head_dim + d]);
      sums[q][0] = _mm512_fmadd_ps(query, low, sums[q][0]);
      sums[q][1] = _mm512_fmadd_ps(query, high, sums[q][1]);
    }
  }
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
    _mm512_storeu_ps(scores[q] + key, sums[q][0]);
    _mm512_storeu_ps(scores[q] + key + kLanes, sums[q][1]);
  }
}

// Converts scores to weights; `rescale` receives the factors `a` of attention.h.
template <std::size_t N>
void weigh(const QueryTile& tile, float (*scores)[kKeysPerBlock], float* rescale) {
  float differences[kLanes] = {};
  const std::size_t begin = tile.first / kLanes * kLanes;
  for (std::size_t q = 0; q < N; ++q) {
    for (std::size_t key = begin; key < tile.first; ++key) scores[q][key] = -INFINITY;
    __m512 max = _mm512_set1_ps(tile.maxima[q]);
    for (std::size_t key = begin; key < tile.visible[q]; key += kLanes) {
      const __mmask16 lanes = first_lanes(tile.visible[q] - key);
      max = _mm512_mask_max_ps(max, lanes, _mm512_loadu_ps(scores[q] + key), max);
    }
    const float new_max = _mm512_reduce_max_ps(max);
    differences[q] = tile.maxima[q] - new_max;
    tile.maxima[q] = new_max;
  }
  _mm512_storeu_ps(rescale, exp_of_nonpositive(_mm512_loadu_ps(differences)));
  for (std::size_t q = 0; q < N; ++q) {
    const __m512 max = _mm512_set1_ps(tile.maxima[q]);
    __m512 sum = _mm512_setzero_ps();
    for (std::size_t key = begin; key < tile.visible[q]; key += kLanes) {
      const __mmask16 lanes = first_lanes(tile.visible[q] - key);
      const __m512 weight = exp_of_nonpositive(_mm512_sub_ps(_mm512_loadu_ps(scores[q] + key), max));
      _mm512_storeu_ps(scores[q] + key, weight);
      sum = _mm512_mask_add_ps(sum, lanes, sum, weight);
    }
    tile.sums[q] = fmaf(tile.sums[q], rescale[q], horizontal_sum(sum));
  }
}

// outs[q][d .. d + V * 16 - 1] of N queries, the last 16 of them masked by `lanes`. A key that is visible
// only to later queries is not added to the earlier ones, not even multiplied by zero.
template <std::size_t N, std::size_t V>
void accumulate(const KeyBlock& block, const QueryTile& tile, const float (*weights)[kKeysPerBlock],
                const float* rescale, std::size_t d, __mmask16 lanes) {
  __mmask16 mask[V];
#pragma GCC unroll 4
  for (std::size_t v = 0; v < V; ++v) mask[v] = v == V - 1 ? lanes : static_cast<__mmask16>(0xffff);
  __m512 sums[N][V];
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) {
      const __m512 old = _mm512_maskz_loadu_ps(mask[v], tile.outs[q] + d + v * kLanes);
      sums[q][v] = _mm512_mul_ps(old, _mm512_set1_ps(rescale[q]));
    }
  }
  const float* values = block.values + tile.first * block.head_dim + d;
  for (std::size_t key = tile.first; key < tile.visible[0]; ++key, values += block.head_dim) {
    __m512 value[V];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) value[v] = _mm512_maskz_loadu_ps(mask[v], values + v * kLanes);
#pragma GCC unroll 6
    for (std::size_t q = 0; q < N; ++q) {
      const __m512 weight = _mm512_set1_ps(weights[q][key]);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < V; ++v) sums[q][v] = _mm512_fmadd_ps(weight, value[v], sums[q][v]);
    }
  }
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
    const float* late_values = values;
    for (std::size_t key = tile.visible[0]; key < tile.visible[q]; ++key, late_values += block.head_dim) {
      const __m512 weight = _mm512_set1_ps(weights[q][key]);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < V; ++v) {
        const __m512 value = _mm512_maskz_loadu_ps(mask[v], late_values + v * kLanes);
        sums[q][v] = _mm512_fmadd_ps(weight, value, sums[q][v]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) {
      store_lanes(tile.outs[q] + d + v * kLanes, mask[v], sums[q][v]);
    }
  }
}

template <std::size_t N>
void attend_tile(const KeyBlock& block, const QueryTile& tile) {
  float weights[N][kKeysPerBlock], rescale[kLanes];
  constexpr std::size_t kAtOnce = 2 * kLanes;
  for (std::size_t key = tile.first / kAtOnce * kAtOnce; key < tile.visible[N - 1]; key += kAtOnce) {
    score<N>(block, tile.queries, key, weights);
  }
  weigh<N>(tile, weights, rescale);
  for (std::size_t d = 0; d < block.head_dim; d += 2 * kLanes) {
    if (d + kLanes < block.head_dim) {
      accumulate<N, 2>(block, tile, weights, rescale, d, first_lanes(block.head_dim - (d + kLanes)));
    } else {
      accumulate<N, 1>(block, tile, weights, rescale, d, first_lanes(block.head_dim - d));
    }
  }
}

constexpr AttendTileFunction* kAttendTile[kQueriesPerTile] = {attend_tile<1>, attend_tile<2>, attend_tile<3>,
                                                              attend_tile<4>, attend_tile<5>, attend_tile<6>};

constexpr AttentionOperations kOperations = {.rope = rope,
                                             .narrow = narrow,
                                             .round = round_plainly,
                                             .widen = widen_f32_f16_avx512vnni,
                                             .quantize = quantize_s8row_f32_avx512vnni,
                                             .dequantize = dequantize,
                                             .transpose = transpose,
                                             .attend_tile = kAttendTile,
                                             .queries_per_tile = kQueriesPerTile};

// The nearest bfloat16, in the upper half of each lane; the lower half is unspecified.
__m512i to_bfloat(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(nearest, is_nan, bits, _mm512_set1_epi32(0x400000));
}

void store_upper_halves(std::uint16_t* out, __m512i values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(_mm512_srli_epi32(values, 16)));
}

void round_to_bfloat(const float* values, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store_upper_halves(out + i, to_bfloat(_mm512_loadu_ps(values + i)));
  }
}

// The scores of a row in a block, with -inf for invisible keys.
class SeenScores {
 public:
  SeenScores(const float* scores, std::size_t first, std::size_t visible)
      : scores_(scores), seen_(~std::uint64_t{0} >> (kKeysPerBlock - visible) & ~std::uint64_t{0} << first) {}

  __m512 load(std::size_t key) const {
    const auto lanes = static_cast<__mmask16>(seen_ >> key);
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes, scores_ + key);
  }

 private:
  static_assert(kKeysPerBlock == 64);
  const float* scores_;
  std::uint64_t seen_;  // one bit per key
};

float find_maximum(const SeenScores& scores, float maximum) {
  __m512 max = _mm512_set1_ps(maximum);
#pragma GCC unroll 4
  for (std::size_t key = 0; key < kKeysPerBlock; key += kLanes) max = _mm512_max_ps(scores.load(key), max);
  return _mm512_reduce_max_ps(max);
}

// Converts the scores of a row to weights, and returns their sum, added in the order of avx2.cc.
float weigh_row(const SeenScores& scores, float maximum, std::uint16_t* weights) {
  const __m512 max = _mm512_set1_ps(maximum);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (std::size_t key = 0; key < kKeysPerBlock; key += kLanes) {
    const __m512i weight = to_bfloat(exp_of_nonpositive(_mm512_sub_ps(scores.load(key), max)));
    store_upper_halves(weights + key, weight);
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(weight, upper)));
  }
  return horizontal_sum(sum);
}

void weigh_rows(const ScoredRows& rows) {
  const auto scores_of = [&](std::size_t row) {
    return SeenScores(rows.scores + row * kKeysPerBlock, rows.first[row], rows.visible[row]);
  };
  for (std::size_t begin = 0; begin < rows.num_rows; begin += kLanes) {
    const std::size_t end = begin + kLanes < rows.num_rows ? begin + kLanes : rows.num_rows;
    float differences[kLanes] = {}, rescale[kLanes];
    for (std::size_t row = begin; row < end; ++row) {
      if (rows.first[row] >= rows.visible[row]) continue;
      const float maximum = find_maximum(scores_of(row), rows.maxima[row]);
      differences[row - begin] = rows.maxima[row] - maximum;
      rows.maxima[row] = maximum;
    }
    _mm512_storeu_ps(rescale, exp_of_nonpositive(_mm512_loadu_ps(differences)));
    for (std::size_t row = begin; row < end; ++row) {
      std::uint16_t* const weights = rows.weights + row * kKeysPerBlock;
      if (rows.first[row] >= rows.visible[row]) {
        std::memset(weights, 0, kKeysPerBlock * sizeof(*weights));
        continue;
      }
      const float factor = rescale[row - begin];
      const float sum = weigh_row(scores_of(row), rows.maxima[row], weights);
      rows.sums[row] = fmaf(rows.sums[row], factor, sum);
      if (factor == 1.0f) continue;
      float* const out = rows.outs + row * rows.columns;
      for (std::size_t d = 0; d < rows.columns; d += kLanes) {
        _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), _mm512_set1_ps(factor)));
      }
    }
  }
}

}  // namespace

TileOperations tile_operations_avx512vnni() {
  TileOperations operations = tile_operations_avx2();  // packs blocks of the other caches
  operations.rope = rope;
  operations.widen = widen_f32_f16_avx512vnni;
  operations.dequantize = dequantize;
  operations.round = round_to_bfloat;
  operations.weigh = weigh_rows;
  return operations;
}

void append_cache_f32_avx512vnni(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                 float* scratch) {
  append_blocked(args, begin, end, scratch, kOperations);
}

void attend_f32_f32_cache_avx512vnni(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                     float* scratch) {
  attend_blocked(args, begin, end, scratch, kOperations);
}

}  // namespace chunkrt
