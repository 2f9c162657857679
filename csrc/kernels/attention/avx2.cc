// attention with AVX2: a tile of 6 queries by 16 keys, then by 16 columns, keeps its sums in 12 of the 16
// registers.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/attention/blocked.h"
#include "kernels/attention/plain_tiles.h"
#include "kernels/attention/round_bfloat.h"
#include "kernels/attention/tiles.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLanes = 8;
constexpr std::size_t kQueriesPerTile = 6;

void rope(const float* input, const float* cos, const float* sin, std::size_t head_dim,
          std::size_t rotary_dim, float scale, float* out) {
  const std::size_t half = rotary_dim / 2;
  const __m256 scales = _mm256_set1_ps(scale);
  std::size_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const __m256 first = _mm256_loadu_ps(input + i), second = _mm256_loadu_ps(input + i + half);
    const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
    const __m256 roped_first = _mm256_fmsub_ps(first, c, _mm256_mul_ps(second, s));
    const __m256 roped_second = _mm256_fmadd_ps(second, c, _mm256_mul_ps(first, s));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(roped_first, scales));
    _mm256_storeu_ps(out + i + half, _mm256_mul_ps(roped_second, scales));
  }
  for (; i < half; ++i) {
    const float first = input[i], second = input[i + half];
    const float second_sin = second * sin[i], first_sin = first * sin[i];
    out[i] = fmaf(first, cos[i], -second_sin) * scale;
    out[i + half] = fmaf(second, cos[i], first_sin) * scale;
  }
  for (i = rotary_dim; i < head_dim; ++i) out[i] = input[i] * scale;
}

void narrow(const float* input, std::uint16_t* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(input + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  for (; i < count; ++i) {
    const __m128i half = _mm_cvtps_ph(_mm_load_ss(input + i), _MM_FROUND_TO_NEAREST_INT);
    out[i] = static_cast<std::uint16_t>(_mm_extract_epi16(half, 0));
  }
}

void dequantize(const std::byte* row, std::size_t head_dim, const float* bias, float* out) {
  const auto* const values = reinterpret_cast<const std::int8_t*>(row);
  for (std::size_t i = 0, end; i < head_dim; i = end) {
    float scale;
    memcpy(&scale, row + head_dim + i / kInt8Group * sizeof(scale), sizeof(scale));
    end = head_dim - i < kInt8Group ? head_dim : i + kInt8Group;
    const __m256 scales = _mm256_set1_ps(scale);
    for (; i + kLanes <= end; i += kLanes) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + i));
      const __m256 added = bias == nullptr ? _mm256_setzero_ps() : _mm256_loadu_ps(bias + i);
      _mm256_storeu_ps(out + i,
                       _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scales, added));
    }
    for (; i < end; ++i) {
      out[i] = fmaf(static_cast<float>(values[i]), scale, bias == nullptr ? 0.0f : bias[i]);
    }
  }
}

// Transposes 8 rows.
void transpose_registers(__m256 (&rows)[8]) {
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

void transpose_8_by_8(const float* const* rows, std::size_t column, float* out) {
  __m256 of[8];
  for (std::size_t i = 0; i < 8; ++i) of[i] = _mm256_loadu_ps(rows[i] + column);
  transpose_registers(of);
  for (std::size_t i = 0; i < 8; ++i) _mm256_storeu_ps(out + i * kKeysPerBlock, of[i]);
}

// Fills num_keys columns, rounded up to a multiple of 16; the columns past num_keys are copies of the last
// key.
void transpose(const float* keys, std::size_t num_keys, std::size_t head_dim, float* out) {
  for (std::size_t key = 0; key < num_keys || key % 16 != 0; key += 8) {
    const float* rows[8];
    for (std::size_t i = 0; i < 8; ++i) {
      rows[i] = keys + (key + i < num_keys ? key + i : num_keys - 1) * head_dim;
    }
    std::size_t d = 0;
    for (; d + 8 <= head_dim; d += 8) transpose_8_by_8(rows, d, out + d * kKeysPerBlock + key);
    for (; d < head_dim; ++d) {
      for (std::size_t i = 0; i < 8; ++i) out[d * kKeysPerBlock + key + i] = rows[i][d];
    }
  }
}

__m256 exp_of_nonpositive(__m256 x) {
  const __m256 limit = _mm256_set1_ps(-kExpLimit);
  const __m256 clamped = _mm256_max_ps(limit, x);  // the operand order keeps a NaN in x
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(kLog2E)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 r =
      _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Low), _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2High), clamped));
  __m256 p = _mm256_set1_ps(kExpCoefficients[4]);
  for (int i = 3; i >= 0; --i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExpCoefficients[i]));
  p = _mm256_fmadd_ps(_mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f)), r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), _mm256_mul_ps(p, power));
}

float horizontal_max(__m256 x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Reduces 16 partial sums: lanes 0-7 in low, 8-15 in high.
float horizontal_sum(__m256 low, __m256 high) {
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// scores[q][key .. key + 15] of N queries.
template <std::size_t N>
void score(const KeyBlock& block, const float* queries, std::size_t key, float (*scores)[kKeysPerBlock]) {
  __m256 sums[N][2];
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) sums[q][0] = sums[q][1] = _mm256_setzero_ps();
  const float* keys = block.keys + key;
  for (std::size_t d = 0; d < block.head_dim; ++d, keys += kKeysPerBlock) {
    const __m256 low = _mm256_loadu_ps(keys), high = _mm256_loadu_ps(keys + kLanes);
#pragma GCC unroll 6
    for (std::size_t q = 0; q < N; ++q) {
      const __m256 query = _mm256_broadcast_ss(queries + q * block.head_dim + d);
      sums[q][0] = _mm256_fmadd_ps(query, low, sums[q][0]);
      sums[q][1] = _mm256_fmadd_ps(query, high, sums[q][1]);
    }
  }
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
    _mm256_storeu_ps(scores[q] + key, sums[q][0]);
    _mm256_storeu_ps(scores[q] + key + kLanes, sums[q][1]);
  }
}

// Converts scores to weights, with 0 for invisible keys up to the next multiple of 16; `rescale` receives the
// factors `a` of attention.h.
template <std::size_t N>
void weigh(const QueryTile& tile, float (*scores)[kKeysPerBlock], float* rescale) {
  float differences[kLanes] = {};
  const std::size_t begin = tile.first / 16 * 16;
  for (std::size_t q = 0; q < N; ++q) {
    for (std::size_t key = begin; key < tile.first; ++key) scores[q][key] = -INFINITY;
    for (std::size_t key = tile.visible[q]; key % 16 != 0; ++key) scores[q][key] = -INFINITY;
    __m256 max = _mm256_set1_ps(tile.maxima[q]);
    for (std::size_t key = begin; key < tile.visible[q]; key += kLanes) {
      max = _mm256_max_ps(_mm256_loadu_ps(scores[q] + key), max);
    }
    const float new_max = horizontal_max(max);
    differences[q] = tile.maxima[q] - new_max;
    tile.maxima[q] = new_max;
  }
  _mm256_storeu_ps(rescale, exp_of_nonpositive(_mm256_loadu_ps(differences)));
  for (std::size_t q = 0; q < N; ++q) {
    const __m256 max = _mm256_set1_ps(tile.maxima[q]);
    __m256 low_sum = _mm256_setzero_ps(), high_sum = _mm256_setzero_ps();
    for (std::size_t key = begin; key < tile.visible[q]; key += 16) {
      const __m256 low = exp_of_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(scores[q] + key), max));
      const __m256 high = exp_of_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(scores[q] + key + kLanes), max));
      _mm256_storeu_ps(scores[q] + key, low);
      _mm256_storeu_ps(scores[q] + key + kLanes, high);
      low_sum = _mm256_add_ps(low_sum, low);
      high_sum = _mm256_add_ps(high_sum, high);
    }
    tile.sums[q] = fmaf(tile.sums[q], rescale[q], horizontal_sum(low_sum, high_sum));
  }
}

// outs[q][d .. d + V * 8 - 1] of N queries. A key that is visible only to later queries is not added to the
// earlier ones, not even multiplied by zero.
template <std::size_t N, std::size_t V>
void accumulate(const KeyBlock& block, const QueryTile& tile, const float (*weights)[kKeysPerBlock],
                const float* rescale, std::size_t d) {
  __m256 sums[N][V];
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) {
      const __m256 old = _mm256_loadu_ps(tile.outs[q] + d + v * kLanes);
      sums[q][v] = _mm256_mul_ps(old, _mm256_broadcast_ss(rescale + q));
    }
  }
  const float* values = block.values + tile.first * block.head_dim + d;
  for (std::size_t key = tile.first; key < tile.visible[0]; ++key, values += block.head_dim) {
#pragma GCC unroll 6
    for (std::size_t q = 0; q < N; ++q) {
      const __m256 weight = _mm256_broadcast_ss(weights[q] + key);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < V; ++v) {
        sums[q][v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values + v * kLanes), sums[q][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (std::size_t q = 0; q < N; ++q) {
    const float* late_values = values;
    for (std::size_t key = tile.visible[0]; key < tile.visible[q]; ++key, late_values += block.head_dim) {
      const __m256 weight = _mm256_broadcast_ss(weights[q] + key);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < V; ++v) {
        sums[q][v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(late_values + v * kLanes), sums[q][v]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t v = 0; v < V; ++v) _mm256_storeu_ps(tile.outs[q] + d + v * kLanes, sums[q][v]);
  }
}

// Computes the columns from d on, one by one.
template <std::size_t N>
void accumulate_rest(const KeyBlock& block, const QueryTile& tile, const float (*weights)[kKeysPerBlock],
                     const float* rescale, std::size_t d) {
  for (; d < block.head_dim; ++d) {
    for (std::size_t q = 0; q < N; ++q) {
      float sum = tile.outs[q][d] * rescale[q];
      for (std::size_t key = tile.first; key < tile.visible[q]; ++key) {
        sum = fmaf(weights[q][key], block.values[key * block.head_dim + d], sum);
      }
      tile.outs[q][d] = sum;
    }
  }
}

template <std::size_t N>
void attend_tile(const KeyBlock& block, const QueryTile& tile) {
  float weights[N][kKeysPerBlock], rescale[kLanes];
  for (std::size_t key = tile.first / 16 * 16; key < tile.visible[N - 1]; key += 16) {
    score<N>(block, tile.queries, key, weights);
  }
  weigh<N>(tile, weights, rescale);
  std::size_t d = 0;
  for (; d + 16 <= block.head_dim; d += 16) accumulate<N, 2>(block, tile, weights, rescale, d);
  if (d + 8 <= block.head_dim) accumulate<N, 1>(block, tile, weights, rescale, d), d += 8;
  accumulate_rest<N>(block, tile, weights, rescale, d);
}

constexpr AttendTileFunction* kAttendTile[kQueriesPerTile] = {attend_tile<1>, attend_tile<2>, attend_tile<3>,
                                                              attend_tile<4>, attend_tile<5>, attend_tile<6>};

constexpr AttentionOperations kOperations = {.rope = rope,
                                             .narrow = narrow,
                                             .round = round_plainly,
                                             .widen = widen_f32_f16_avx2,
                                             .quantize = quantize_s8row_f32_avx2,
                                             .dequantize = dequantize,
                                             .transpose = transpose,
                                             .attend_tile = kAttendTile,
                                             .queries_per_tile = kQueriesPerTile};

// The nearest bfloat16, in the upper half of each lane; the lower half is unspecified.
__m256i to_bfloat(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  return _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(nearest), _mm256_castsi256_ps(quiet), is_nan));
}

// Packs the upper halves of sixteen lanes.
__m256i upper_halves(__m256i low, __m256i high) {
  const __m256i halves = _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
  return _mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0));
}

__m256i to_bfloats(const float* values) {
  return upper_halves(to_bfloat(_mm256_loadu_ps(values)), to_bfloat(_mm256_loadu_ps(values + kLanes)));
}

void round_to_bfloat(const float* values, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), to_bfloats(values + i));
  }
}

// Arranges sixteen dimensions of eight keys by pairs: an 8 by 8 transposition of 32-bit pairs.
void pack_eight_keys(const float* keys, std::size_t depth, std::uint16_t* out) {
  __m256 rows[8];
  for (std::size_t i = 0; i < 8; ++i) rows[i] = _mm256_castsi256_ps(to_bfloats(keys + i * depth));
  transpose_registers(rows);
  for (std::size_t i = 0; i < 8; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * kDepthPerTile), _mm256_castps_si256(rows[i]));
  }
}

void pack_keys(const float* keys, std::size_t depth, std::uint16_t* out) {
  for (std::size_t d = 0; d < depth; d += 16, out += 8 * kDepthPerTile) {
    pack_eight_keys(keys + d, depth, out);
    pack_eight_keys(keys + 8 * depth + d, depth, out + kDepthPerTile / 2);
  }
}

bool pack_values(const float* values, std::size_t stride, std::size_t columns, std::uint16_t* out) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), infinity = _mm256_set1_epi32(0x7f7fffff);
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t key = 0; key < kRowsPerTile; key += 2, out += kDepthPerTile) {
    const float* const row = values + key * stride;
    for (std::size_t d = 0; d < columns; d += kLanes) {
      const __m256i first = to_bfloat(_mm256_loadu_ps(row + d));
      const __m256i second = to_bfloat(_mm256_loadu_ps(row + stride + d));
      largest = _mm256_max_epi32(largest, _mm256_and_si256(first, magnitude));
      largest = _mm256_max_epi32(largest, _mm256_and_si256(second, magnitude));
      const __m256i pair = _mm256_blend_epi16(_mm256_srli_epi32(first, 16), second, 0xaa);
      std::uint16_t* const to = out + d / 16 * 16 * kKeysPerBlock + d % 16 * 2;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pair);
    }
  }
  return _mm256_testz_si256(_mm256_cmpgt_epi32(largest, infinity), magnitude) != 0;
}

// The new maximum of a row with visible keys; scores of invisible keys become -inf.
float find_maximum(float* scores, std::size_t first, std::size_t visible, float maximum) {
  for (std::size_t key = 0; key < first; ++key) scores[key] = -INFINITY;
  for (std::size_t key = visible; key < kKeysPerBlock; ++key) scores[key] = -INFINITY;
  __m256 max = _mm256_set1_ps(maximum);
  for (std::size_t key = 0; key < kKeysPerBlock; key += kLanes) {
    max = _mm256_max_ps(_mm256_loadu_ps(scores + key), max);
  }
  return horizontal_max(max);
}

// Converts the scores of a row to weights, and returns their sum.
float weigh_row(const float* scores, float maximum, std::uint16_t* weights) {
  const __m256 max = _mm256_set1_ps(maximum);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256 low_sum = _mm256_setzero_ps(), high_sum = _mm256_setzero_ps();
  for (std::size_t key = 0; key < kKeysPerBlock; key += 16) {
    const __m256i low = to_bfloat(exp_of_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(scores + key), max)));
    const __m256i high =
        to_bfloat(exp_of_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(scores + key + kLanes), max)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + key), upper_halves(low, high));
    low_sum = _mm256_add_ps(low_sum, _mm256_castsi256_ps(_mm256_and_si256(low, upper)));
    high_sum = _mm256_add_ps(high_sum, _mm256_castsi256_ps(_mm256_and_si256(high, upper)));
  }
  return horizontal_sum(low_sum, high_sum);
}

void weigh_rows(const ScoredRows& rows) {
  for (std::size_t begin = 0; begin < rows.num_rows; begin += kLanes) {
    const std::size_t end = begin + kLanes < rows.num_rows ? begin + kLanes : rows.num_rows;
    float differences[kLanes] = {}, rescale[kLanes];
    for (std::size_t row = begin; row < end; ++row) {
      if (rows.first[row] >= rows.visible[row]) continue;
      const float maximum = find_maximum(rows.scores + row * kKeysPerBlock, rows.first[row],
                                         rows.visible[row], rows.maxima[row]);
      differences[row - begin] = rows.maxima[row] - maximum;
      rows.maxima[row] = maximum;
    }
    _mm256_storeu_ps(rescale, exp_of_nonpositive(_mm256_loadu_ps(differences)));
    for (std::size_t row = begin; row < end; ++row) {
      std::uint16_t* const weights = rows.weights + row * kKeysPerBlock;
      if (rows.first[row] >= rows.visible[row]) {
        std::memset(weights, 0, kKeysPerBlock * sizeof(*weights));
        continue;
      }
      const float factor = rescale[row - begin];
      const float sum = weigh_row(rows.scores + row * kKeysPerBlock, rows.maxima[row], weights);
      rows.sums[row] = fmaf(rows.sums[row], factor, sum);
      if (factor == 1.0f) continue;
      float* const out = rows.outs + row * rows.columns;
      for (std::size_t d = 0; d < rows.columns; d += kLanes) {
        _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(out + d), _mm256_set1_ps(factor)));
      }
    }
  }
}

constexpr TileOperations kTileOperations = {.rope = rope,
                                            .widen = widen_f32_f16_avx2,
                                            .dequantize = dequantize,
                                            .round = round_to_bfloat,
                                            .pack_keys = pack_keys,
                                            .pack_values = pack_values,
                                            .weigh = weigh_rows};

}  // namespace

const TileOperations& tile_operations_avx2() { return kTileOperations; }

void append_cache_f32_avx2(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch) {
  append_blocked(args, begin, end, scratch, kOperations);
}

void attend_f32_f32_cache_avx2(const AttentionArgs& args, std::size_t begin, std::size_t end,
                               float* scratch) {
  attend_blocked(args, begin, end, scratch, kOperations);
}

void attend_f32_bf16_cache_avx2(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                float* scratch) {
  attend_by_tiles<PlainTiles>(args, begin, end, scratch, kTileOperations);
}

}  // namespace chunkrt
