// gemm with AVX2: vpmaddubsw multiplies unsigned by signed bytes, and adds neighbours in int16, with
// saturation.
//
// The weights become the unsigned side (w + 128, a flip of the top bit), so that nothing has to be prepared
// when they are mapped; starting each sum at -128 * sum_k left[m, k] takes the offset back out. Sums wrap
// modulo 2^32 on the way, which leaves the exact result.
//
// Neighbours a and b with |a| + |b| <= 128 saturate with no weights: 255 * 128 = 32640. Of those beyond, what
// exceeds 64 of each is their excess, 64 or less again, and is multiplied apart. Where a row is an int8 grid
// on its largest value, 1 pair in 100 is beyond; where very many are, as in the low digits of 16 bits, both
// sides are widened.
#include <immintrin.h>

#include <bit>
#include <cstdlib>
#include <cstring>

#include "kernels/gemm/panel_avx2.h"
#include "kernels/gemm/widened_avx2.h"

namespace chunkrt {
namespace {

// With 4 rows the sums of a block's 16 columns fill 8 of the 16 registers, and nothing has to be reloaded.
constexpr std::size_t kTileRows = 4;
constexpr std::size_t kVectorColumns = 8;
constexpr std::size_t kVectors = kGemmColumnsPerBlock / kVectorColumns;

constexpr int kLargestPair = 128;
constexpr int kKept = 64;
constexpr std::size_t kGroupsPerVector = sizeof(__m256i) / kGemmDepthPerGroup;

// A group with excess takes twice as long and more, widened ones half as long again: of so many pairs one may
// be large.
constexpr std::size_t kPairsPerLarge = 16;

struct Sums {
  __m256i of[kTileRows][kVectors];
};

// What is multiplied apart: a group of a row's chunk.
struct Excess {
  std::uint16_t group;
  std::uint16_t row;  // of the tile
  std::int32_t quad;
};

struct Panel {
  Sums sums[kPanelBlocks];
  const std::int8_t* rows[kTileRows];           // of a chunk and without excess,
  std::int8_t without[kTileRows][kChunkDepth];  // which is here if there was any
  Excess excess[kTileRows * kChunkGroups];
  std::size_t num_excess;
};

// A bit for each byte of a pair that is large.
unsigned large_pairs(__m256i values) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values), _mm256_set1_epi8(1));
  const __m256i are_large = _mm256_cmpgt_epi16(pairs, _mm256_set1_epi16(kLargestPair));
  return static_cast<unsigned>(_mm256_movemask_epi8(are_large));
}

__m256i load(const std::int8_t* values) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
}

std::size_t count_large_pairs(const std::int8_t* values, std::size_t groups) {
  std::size_t count = 0;
  for (; groups >= kGroupsPerVector; groups -= kGroupsPerVector, values += sizeof(__m256i)) {
    if (const unsigned large = large_pairs(load(values))) count += std::popcount(large) / 2u;
  }
  std::int8_t last[sizeof(__m256i)] = {};
  std::memcpy(last, values, groups * kGemmDepthPerGroup);
  return count + std::popcount(large_pairs(load(last))) / 2u;
}

// What fits of a value in a large pair; the value becomes the rest.
std::int8_t take_fitting(std::int8_t& value) {
  const int fits = value > kKept ? kKept : value < -kKept ? -kKept : value;
  value = static_cast<std::int8_t>(value - fits);
  return static_cast<std::int8_t>(fits);
}

void part_group(std::int8_t* values, std::size_t group, std::size_t row, Panel& panel) {
  std::int8_t excess[kGemmDepthPerGroup] = {};
  for (std::size_t k = 0; k < kGemmDepthPerGroup; k += 2) {
    if (std::abs(values[k]) + std::abs(values[k + 1]) <= kLargestPair) continue;
    std::memcpy(excess + k, values + k, 2);
    values[k] = take_fitting(excess[k]);
    values[k + 1] = take_fitting(excess[k + 1]);
  }
  Excess& next = panel.excess[panel.num_excess++];
  next.group = static_cast<std::uint16_t>(group);
  next.row = static_cast<std::uint16_t>(row);
  std::memcpy(&next.quad, excess, sizeof(excess));
}

// Copies a row's chunk without its excess, which is added to the panel's.
void part_row(std::size_t groups, std::size_t row, Panel& panel) {
  std::int8_t* const values = panel.without[row];
  std::memcpy(values, panel.rows[row], groups * kGemmDepthPerGroup);
  const std::size_t whole = (groups + kGroupsPerVector - 1) / kGroupsPerVector * kGroupsPerVector;
  std::memset(values + groups * kGemmDepthPerGroup, 0, (whole - groups) * kGemmDepthPerGroup);
  for (std::size_t group = 0; group < whole; group += kGroupsPerVector) {
    unsigned large = large_pairs(load(values + group * kGemmDepthPerGroup));
    while (large != 0) {
      const std::size_t each = group + static_cast<std::size_t>(std::countr_zero(large)) / kGemmDepthPerGroup;
      part_group(values + each * kGemmDepthPerGroup, each, row, panel);
      large &= ~(0xfu << (each - group) * kGemmDepthPerGroup);
    }
  }
  panel.rows[row] = values;
}

__m256i unsigned_weights(const std::int8_t* right) {
  return _mm256_xor_si256(load(right), _mm256_set1_epi8(-128));
}

__m256i add_products(__m256i sums, __m256i weights, __m256i activations) {
  const __m256i pairs = _mm256_maddubs_epi16(weights, activations);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Adds the products of `groups` groups to a tile's sums. All loops but the one over k unroll, so that the
// sums are registers; inlining this into the code around it costs some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const std::int8_t* const* rows, const std::int8_t* right,
                                  std::size_t groups, Sums& total) {
  const std::int8_t* left[Rows];
  __m256i sums[Rows][kVectors];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) sums[m][v] = total.of[m][v];
    left[m] = rows[m];
  }
  for (std::size_t depth = 0; depth < groups * kGemmDepthPerGroup; depth += kGemmDepthPerGroup) {
    const __m256i first = unsigned_weights(right), second = unsigned_weights(right + sizeof(__m256i));
    right += kGemmBytesPerGroup;
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
      std::int32_t quad;
      std::memcpy(&quad, left[m] + depth, sizeof(quad));
      const __m256i activations = _mm256_set1_epi32(quad);
      sums[m][0] = add_products(sums[m][0], first, activations);
      sums[m][1] = add_products(sums[m][1], second, activations);
    }
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) total.of[m][v] = sums[m][v];
  }
}

void accumulate_excess(const Panel& panel, const std::int8_t* right, Sums& sums) {
  for (std::size_t i = 0; i < panel.num_excess; ++i) {
    const Excess& excess = panel.excess[i];
    const std::int8_t* const group = right + excess.group * kGemmBytesPerGroup;
    const __m256i activations = _mm256_set1_epi32(excess.quad);
    __m256i* const of_row = sums.of[excess.row];
    of_row[0] = add_products(of_row[0], unsigned_weights(group), activations);
    of_row[1] = add_products(of_row[1], unsigned_weights(group + sizeof(__m256i)), activations);
  }
}

// Computes Rows rows of a panel, unless too many pairs of their first chunk are large: then it returns false.
template <std::size_t Rows>
bool compute_panel(const GemmArgs& args, std::size_t row, std::size_t block, std::size_t num_blocks) {
  Panel panel;
  for (std::size_t group = 0; group < args.groups; group += kChunkGroups) {
    const std::size_t num_groups = smaller(kChunkGroups, args.groups - group);
    std::size_t large[Rows], num_large = 0;
    for (std::size_t m = 0; m < Rows; ++m) {
      panel.rows[m] = args.left + ((row + m) * args.groups + group) * kGemmDepthPerGroup;
      num_large += large[m] = count_large_pairs(panel.rows[m], num_groups);
    }
    if (group == 0) {
      if (num_large * kPairsPerLarge > 2 * num_groups * Rows) return false;
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256i offset = _mm256_set1_epi32(-128 * args.left_sums[row + m]);
        for (Sums& sums : panel.sums) sums.of[m][0] = sums.of[m][1] = offset;
      }
    }
    panel.num_excess = 0;
    for (std::size_t m = 0; m < Rows; ++m) {
      if (large[m] > 0) part_row(num_groups, m, panel);
    }
    for (std::size_t b = 0; b < num_blocks; ++b) {
      const std::int8_t* const right = args.right + ((block + b) * args.groups + group) * kGemmBytesPerGroup;
      accumulate<Rows>(panel.rows, right, num_groups, panel.sums[b]);
      accumulate_excess(panel, right, panel.sums[b]);
    }
  }
  for (std::size_t b = 0; b < num_blocks; ++b) {
    for (std::size_t m = 0; m < Rows; ++m) {
      for (std::size_t v = 0; v < kVectors; ++v) {
        store_columns(args, row + m, (block + b) * kGemmColumnsPerBlock + v * kVectorColumns,
                      _mm256_cvtepi32_ps(panel.sums[b].of[m][v]), args.right_scales);
      }
    }
  }
  return true;
}

}  // namespace

void gemm_f32_s8row_s8col_avx2(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  constexpr bool (*kComputePanel[])(const GemmArgs&, std::size_t, std::size_t, std::size_t) = {
      compute_panel<1>, compute_panel<2>, compute_panel<3>, compute_panel<4>};
  for (std::size_t block = block_begin; block < block_end; block += kPanelBlocks) {
    const std::size_t num_blocks = smaller(kPanelBlocks, block_end - block);
    for (std::size_t row = 0; row < args.rows;) {
      std::size_t num_rows = smaller(kTileRows, args.rows - row);
      if (!kComputePanel[num_rows - 1](args, row, block, num_blocks)) {
        num_rows = smaller(widened::kTileRows, args.rows - row);
        widened::multiply(args, row, num_rows, block, num_blocks);
      }
      row += num_rows;
    }
  }
}

}  // namespace chunkrt
