// gemm with AVX2: vpmaddubsw multiplies unsigned by signed bytes, and adds adjacent products in int16.
//
// The weights become the unsigned operand (w + 128, a flip of the top bit), so mapped weights need no
// preparation. Each sum starts at -128 * sum_k left[m, k], which cancels this offset. Intermediate sums wrap
// modulo 2^32, but the result is exact. Activations are split, so that no sum saturates; rows that are not
// split are multiplied with both operands widened.
#include <immintrin.h>

#include <bit>
#include <cstring>

#include "kernels/gemm/arranged.h"
#include "kernels/gemm/panel_avx2.h"
#include "kernels/gemm/parted.h"
#include "kernels/gemm/widened_avx2.h"

namespace chunkrt {
namespace {

constexpr std::size_t kVectorColumns = 8;
constexpr std::size_t kVectors = kGemmColumnsPerBlock / kVectorColumns;

// The sums of 5 rows of a block take 10 of the 16 registers, and two groups of its weights take 4.
constexpr std::size_t kTileRows = 5;

// Number of column blocks per pass for a single row; this case is memory-bound.
constexpr std::size_t kRowBlocks = 6;

constexpr int kLargestSum = 128;
constexpr std::int8_t kKeptOfPair = 64;
constexpr std::size_t kGroupsPerVector = sizeof(__m256i) / kGemmDepthPerGroup;

struct PartedRow {
  std::int32_t num_excess;  // or kNotParted
  const std::int8_t* values;
  const GemmExcess* excess;
};

PartedRow parted_row(const GemmArgs& args, std::size_t row) {
  const std::int8_t* const begin = args.arranged + row * parted_row_bytes(args.groups);
  PartedRow out;
  std::memcpy(&out.num_excess, begin, sizeof(out.num_excess));
  out.values = begin + kPartedHeaderBytes;
  out.excess = reinterpret_cast<const GemmExcess*>(out.values + parted_values_bytes(args.groups));
  return out;
}

__m256i load(const std::int8_t* values) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
}

struct Sides {
  __m256i above, below;  // int16: the sums of positive values, and of the magnitudes of negative values
};

Sides pairs_of(__m256i values) {
  const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1);
  // The magnitude of -128 is 128 as an unsigned byte.
  const __m256i below = _mm256_and_si256(_mm256_abs_epi8(values), _mm256_cmpgt_epi8(zero, values));
  return {_mm256_maddubs_epi16(_mm256_max_epi8(values, zero), one), _mm256_maddubs_epi16(below, one)};
}

Sides fours_of(Sides pairs) {
  constexpr int kOtherGroup = 0b10110001;
  return {_mm256_add_epi16(pairs.above, _mm256_shuffle_epi32(pairs.above, kOtherGroup)),
          _mm256_add_epi16(pairs.below, _mm256_shuffle_epi32(pairs.below, kOtherGroup))};
}

__m256i are_too_large(Sides sums) {
  return _mm256_cmpgt_epi16(_mm256_max_epi16(sums.above, sums.below), _mm256_set1_epi16(kLargestSum));
}

// Returns the part of pairs that fits if no other pair is added to them.
__m256i fitting_pairs(__m256i values, Sides pairs) {
  const __m256i kept =
      _mm256_max_epi8(_mm256_min_epi8(values, _mm256_set1_epi8(kKeptOfPair)), _mm256_set1_epi8(-kKeptOfPair));
  return _mm256_blendv_epi8(values, kept, are_too_large(pairs));
}

// Returns the part of groups of four that fits; of a group that is too large, only the second pair.
__m256i fitting_fours(__m256i values) {
  const Sides pairs = pairs_of(values);
  const __m256i second =
      _mm256_and_si256(fitting_pairs(values, pairs), _mm256_set1_epi64x(~std::int64_t{0xffffffff}));
  return _mm256_blendv_epi8(values, second, are_too_large(fours_of(pairs)));
}

// Appends the non-zero values of `rest`, which holds the groups from `group` on. Returns the new number of
// excess groups, or kNotParted.
std::int32_t append_excess(__m256i rest, std::size_t group, std::size_t most, GemmExcess* excess,
                           std::int32_t count) {
  const __m256i zero = _mm256_setzero_si256();
  while (true) {
    const __m256i none = _mm256_cmpeq_epi32(rest, zero);
    auto found = ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(none))) & 0xffu;
    if (found == 0) return count;
    if (static_cast<std::size_t>(count) + static_cast<std::size_t>(std::popcount(found)) > most) {
      return kNotParted;
    }
    const __m256i now = fitting_pairs(rest, pairs_of(rest));
    rest = _mm256_sub_epi8(rest, now);
    std::int32_t quads[kGroupsPerVector];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(quads), now);
    for (; found != 0; found &= found - 1) {
      const auto each = static_cast<std::size_t>(std::countr_zero(found));
      excess[count++] = {static_cast<std::int32_t>(group + each), quads[each]};
    }
  }
}

void part_row(const std::int8_t* input, std::size_t groups, std::int8_t* out) {
  std::int8_t* const values = out + kPartedHeaderBytes;
  auto* const excess = reinterpret_cast<GemmExcess*>(values + parted_values_bytes(groups));
  std::int32_t count = 0;
  for (std::size_t group = 0; group < groups && count != kNotParted; group += kGroupsPerVector) {
    const std::size_t bytes = smaller(groups - group, kGroupsPerVector) * kGemmDepthPerGroup;
    std::int8_t last[sizeof(__m256i)] = {};
    const std::int8_t* source = input + group * kGemmDepthPerGroup;
    if (bytes < sizeof(last)) source = static_cast<const std::int8_t*>(std::memcpy(last, source, bytes));
    const __m256i whole = load(source), fits = fitting_fours(whole);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + group * kGemmDepthPerGroup), fits);
    count = append_excess(_mm256_sub_epi8(whole, fits), group, most_excess(groups), excess, count);
  }
  std::memcpy(out, &count, sizeof(count));
}

__m256i unsigned_weights(const std::int8_t* right) {
  return _mm256_xor_si256(load(right), _mm256_set1_epi8(-128));
}

__m256i quad_at(const std::int8_t* values) {
  std::int32_t quad;
  std::memcpy(&quad, values, sizeof(quad));
  return _mm256_set1_epi32(quad);
}

__m256i add_pairs(__m256i sums, __m256i pairs) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

__m256i add_products(__m256i sums, __m256i weights, __m256i activations) {
  return add_pairs(sums, _mm256_maddubs_epi16(weights, activations));
}

// Adds the products of `groups` groups to the sums of Rows rows of a block, two groups at a time. All loops
// except the one over k are unrolled, so that the sums stay in registers; if this function were inlined, the
// compiler would spill some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const std::int8_t* const* rows, const std::int8_t* right,
                                  std::size_t groups, __m256i (&total)[Rows][kVectors]) {
  const std::int8_t* left[Rows];
  __m256i sums[Rows][kVectors];
#pragma GCC unroll 5
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) sums[m][v] = total[m][v];
    left[m] = rows[m];
  }
  constexpr std::size_t kOf[] = {0, sizeof(__m256i)};
  const std::size_t depth = groups * kGemmDepthPerGroup;
  std::size_t k = 0;
  for (; k + 2 * kGemmDepthPerGroup <= depth; k += 2 * kGemmDepthPerGroup) {
    __m256i first[kVectors], second[kVectors];
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) {
      first[v] = unsigned_weights(right + kOf[v]);
      second[v] = unsigned_weights(right + kGemmBytesPerGroup + kOf[v]);
    }
    right += 2 * kGemmBytesPerGroup;
#pragma GCC unroll 5
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m256i quad = quad_at(left[m] + k), next_quad = quad_at(left[m] + k + kGemmDepthPerGroup);
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(first[v], quad),
                                               _mm256_maddubs_epi16(second[v], next_quad));
        sums[m][v] = add_pairs(sums[m][v], pairs);
      }
    }
  }
  if (k < depth) {
#pragma GCC unroll 5
    for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        sums[m][v] = add_products(sums[m][v], unsigned_weights(right + kOf[v]), quad_at(left[m] + k));
      }
    }
  }
#pragma GCC unroll 5
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) total[m][v] = sums[m][v];
  }
}

// Adds the products of a row's excess to its sums.
void accumulate_excess(const PartedRow& row, const std::int8_t* right, __m256i (&sums)[kVectors]) {
  for (std::int32_t i = 0; i < row.num_excess; ++i) {
    const std::int8_t* group = right + static_cast<std::size_t>(row.excess[i].group) * kGemmBytesPerGroup;
    const __m256i activations = _mm256_set1_epi32(row.excess[i].quad);
    for (std::size_t v = 0; v < kVectors; ++v, group += sizeof(__m256i)) {
      sums[v] = add_products(sums[v], unsigned_weights(group), activations);
    }
  }
}

// Like accumulate, for one row and blocks that are `stride` bytes apart. If weights are used only once,
// memory bandwidth is the limit, and blocks that are read in parallel form separate streams for the
// prefetchers.
template <std::size_t Blocks>
[[gnu::noinline]] void accumulate_row(const std::int8_t* left, const std::int8_t* right, std::size_t stride,
                                      std::size_t groups, __m256i (&total)[Blocks][kVectors]) {
  __m256i sums[Blocks][kVectors];
#pragma GCC unroll 6
  for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) sums[b][v] = total[b][v];
  }
  for (; groups >= 2; groups -= 2) {
    const __m256i quad = quad_at(left), next_quad = quad_at(left + kGemmDepthPerGroup);
#pragma GCC unroll 6
    for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        const std::int8_t* const first = right + b * stride + v * sizeof(__m256i);
        const __m256i pairs =
            _mm256_add_epi16(_mm256_maddubs_epi16(unsigned_weights(first), quad),
                             _mm256_maddubs_epi16(unsigned_weights(first + kGemmBytesPerGroup), next_quad));
        sums[b][v] = add_pairs(sums[b][v], pairs);
      }
    }
    left += 2 * kGemmDepthPerGroup;
    right += 2 * kGemmBytesPerGroup;
  }
  if (groups > 0) {
#pragma GCC unroll 6
    for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        const std::int8_t* const last = right + b * stride + v * sizeof(__m256i);
        sums[b][v] = add_products(sums[b][v], unsigned_weights(last), quad_at(left));
      }
    }
  }
#pragma GCC unroll 6
  for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) total[b][v] = sums[b][v];
  }
}

void store_block(const GemmArgs& args, std::size_t row, std::size_t block, const __m256i (&sums)[kVectors]) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    store_columns(args, row, block * kGemmColumnsPerBlock + v * kVectorColumns, _mm256_cvtepi32_ps(sums[v]),
                  args.right_scales);
  }
}

// Computes one split row for Blocks blocks.
template <std::size_t Blocks>
void compute_row(const GemmArgs& args, std::size_t row, const PartedRow& parts, std::size_t block) {
  const std::size_t stride = args.groups * kGemmBytesPerGroup;
  const std::int8_t* const right = args.right + block * stride;
  const __m256i offset = _mm256_set1_epi32(-128 * args.left_sums[row]);
  __m256i sums[Blocks][kVectors];
  for (std::size_t b = 0; b < Blocks; ++b) {
    for (__m256i& of : sums[b]) of = offset;
  }
  accumulate_row(parts.values, right, stride, args.groups, sums);
  for (std::size_t b = 0; b < Blocks; ++b) {
    accumulate_excess(parts, right + b * stride, sums[b]);
    store_block(args, row, block + b, sums[b]);
  }
}

// Computes Rows rows for a range of blocks; returns false if one of the rows is not split.
template <std::size_t Rows>
bool compute_tile(const GemmArgs& args, std::size_t row, std::size_t block, std::size_t end) {
  PartedRow parts[Rows];
  const std::int8_t* rows[Rows];
  for (std::size_t m = 0; m < Rows; ++m) {
    parts[m] = parted_row(args, row + m);
    if (parts[m].num_excess == kNotParted) return false;
    rows[m] = parts[m].values;
  }
  if constexpr (Rows == 1) {
    for (; block + kRowBlocks <= end; block += kRowBlocks)
      compute_row<kRowBlocks>(args, row, parts[0], block);
  }
  for (; block < end; ++block) {
    const std::int8_t* const right = args.right + block * args.groups * kGemmBytesPerGroup;
    __m256i sums[Rows][kVectors];
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m256i offset = _mm256_set1_epi32(-128 * args.left_sums[row + m]);
      for (__m256i& of : sums[m]) of = offset;
    }
    accumulate(rows, right, args.groups, sums);
    for (std::size_t m = 0; m < Rows; ++m) {
      accumulate_excess(parts[m], right, sums[m]);
      store_block(args, row + m, block, sums[m]);
    }
  }
  return true;
}

}  // namespace

void part_rows_avx2(const std::int8_t* values, std::size_t groups, std::size_t row_begin, std::size_t row_end,
                    std::int8_t* arranged) {
  for (std::size_t row = row_begin; row < row_end; ++row) {
    part_row(values + row * groups * kGemmDepthPerGroup, groups, arranged + row * parted_row_bytes(groups));
  }
}

void gemm_f32_s8row_s8col_avx2(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  constexpr bool (*kComputeTile[])(const GemmArgs&, std::size_t, std::size_t, std::size_t) = {
      compute_tile<1>, compute_tile<2>, compute_tile<3>, compute_tile<4>, compute_tile<5>};
  for (std::size_t block = block_begin; block < block_end; block += kPanelBlocks) {
    const std::size_t end = smaller(block + kPanelBlocks, block_end);
    for (std::size_t row = 0; row < args.rows;) {
      const std::size_t num_tiles = (args.rows - row + kTileRows - 1) / kTileRows;
      std::size_t num_rows = (args.rows - row + num_tiles - 1) / num_tiles;  // as even as possible
      if (args.arranged == nullptr || !kComputeTile[num_rows - 1](args, row, block, end)) {
        num_rows = smaller(widened::kTileRows, args.rows - row);
        widened::multiply(args, row, num_rows, block, end - block);
      }
      row += num_rows;
    }
  }
}

}  // namespace chunkrt
