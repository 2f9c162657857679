// gemm with AVX2 for rows with arbitrary values: both operands are widened to int16 for vpmaddwd, whose int32
// sums are exact. Activations are widened once for a panel of columns, and weights are widened on loading.
// Nothing here is visible outside of avx2.cc.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/gemm/panel_avx2.h"

namespace chunkrt {
namespace {
namespace widened {

// A register of widened weights holds 4 values along k of 4 columns, so 8 columns take two registers; with 6
// rows the accumulators fill 12 of the 16 registers.
constexpr std::size_t kTileRows = 6;
constexpr std::size_t kTileColumns = 8;
constexpr std::size_t kTileBytesPerGroup = kTileColumns * kGemmDepthPerGroup;
constexpr std::size_t kTilesPerBlock = kGemmColumnsPerBlock / kTileColumns;
constexpr std::size_t kPanelTiles = kPanelBlocks * kTilesPerBlock;

struct Sums {
  __m256i of[kTileRows][2];  // each int32 is the sum over one pair of k; a column's two pairs are adjacent
};

struct Panel {
  Sums sums[kPanelTiles];
  std::int16_t left[kTileRows][kChunkDepth];
};

void widen(const std::int8_t* input, std::size_t groups, std::int16_t* out) {
  const std::int8_t* end = input + groups * kGemmDepthPerGroup;
  for (; input + 16 <= end; input += 16, out += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(input));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_cvtepi8_epi16(bytes));
  }
  for (; input < end; ++input, ++out) *out = *input;
}

// Adds the products of `groups` groups to a tile's sums. All loops except the one over k are unrolled, so
// that the sums stay in registers; if this function were inlined, the compiler would spill some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const std::int16_t (*left)[kChunkDepth], const std::int8_t* right,
                                  std::size_t groups, Sums& total) {
  __m256i sums[Rows][2];
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) {
    sums[m][0] = total.of[m][0];
    sums[m][1] = total.of[m][1];
  }
  for (std::size_t depth = 0; depth < groups * kGemmDepthPerGroup; depth += kGemmDepthPerGroup) {
    const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(right)));
    const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(right + 16)));
    right += kGemmBytesPerGroup;
#pragma GCC unroll 6
    for (std::size_t m = 0; m < Rows; ++m) {
      std::int64_t quad;
      std::memcpy(&quad, left[m] + depth, sizeof(quad));
      const __m256i activations = _mm256_set1_epi64x(quad);
      sums[m][0] = _mm256_add_epi32(sums[m][0], _mm256_madd_epi16(low, activations));
      sums[m][1] = _mm256_add_epi32(sums[m][1], _mm256_madd_epi16(high, activations));
    }
  }
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) {
    total.of[m][0] = sums[m][0];
    total.of[m][1] = sums[m][1];
  }
}

template <std::size_t Rows>
void compute_panel(const GemmArgs& args, std::size_t row, std::size_t block, std::size_t num_blocks) {
  const std::size_t num_columns =
      smaller(num_blocks * kGemmColumnsPerBlock, args.columns - block * kGemmColumnsPerBlock);
  const std::size_t num_tiles = (num_columns + kTileColumns - 1) / kTileColumns;
  Panel panel;
  std::memset(panel.sums, 0, sizeof(panel.sums));
  for (std::size_t group = 0; group < args.groups; group += kChunkGroups) {
    const std::size_t num_groups = smaller(kChunkGroups, args.groups - group);
    for (std::size_t m = 0; m < Rows; ++m) {
      widen(args.left + ((row + m) * args.groups + group) * kGemmDepthPerGroup, num_groups, panel.left[m]);
    }
    for (std::size_t tile = 0; tile < num_tiles; ++tile) {
      const std::size_t right_group = (block + tile / kTilesPerBlock) * args.groups + group;
      const std::int8_t* right = args.right + right_group * kGemmBytesPerGroup;
      accumulate<Rows>(panel.left, right + tile % kTilesPerBlock * kTileBytesPerGroup, num_groups,
                       panel.sums[tile]);
    }
  }
  for (std::size_t tile = 0; tile < num_tiles; ++tile) {
    const std::size_t column = block * kGemmColumnsPerBlock + tile * kTileColumns;
    for (std::size_t m = 0; m < Rows; ++m) {
      // hadd adds the pairs within 128-bit lanes and leaves columns 0 1 4 5 2 3 6 7.
      const __m256i pairs = _mm256_hadd_epi32(panel.sums[tile].of[m][0], panel.sums[tile].of[m][1]);
      store_columns(args, row + m, column, _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(pairs, 0b11011000)),
                    args.right_scales);
    }
  }
}

// Maximum number of rows and blocks at a time.
void multiply(const GemmArgs& args, std::size_t row, std::size_t num_rows, std::size_t block,
              std::size_t num_blocks) {
  constexpr void (*kComputePanel[])(const GemmArgs&, std::size_t, std::size_t, std::size_t) = {
      compute_panel<1>, compute_panel<2>, compute_panel<3>,
      compute_panel<4>, compute_panel<5>, compute_panel<6>};
  kComputePanel[num_rows - 1](args, row, block, num_blocks);
}

}  // namespace widened
}  // namespace
}  // namespace chunkrt
