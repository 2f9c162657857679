// gemm with AVX-512 VNNI: vpdpbusd multiplies unsigned by signed bytes, four values along k at a time,
// without saturation.
//
// The weights become the unsigned operand (w + 128, a flip of the top bit), so mapped weights need no
// preparation. Each sum starts at -128 * sum_k left[m, k], which cancels this offset. Intermediate sums wrap
// modulo 2^32, but the result is exact.
#include <immintrin.h>

#include <cstring>

#include "kernels/gemm/gemm.h"
#include "kernels/store_avx512.h"

namespace chunkrt {
namespace {

// A tile's accumulators fill 24 of the 32 registers: each loaded weight is used 8 times, each loaded
// activation 3 times.
constexpr std::size_t kTileRows = 8;
constexpr std::size_t kTileBlocks = 3;

// Number of partial sums per column for a single row, and the distance by which its weights are prefetched.
constexpr std::size_t kChains = 4;
constexpr std::size_t kBytesAhead = 8192;

struct Sums {
  __m512i of[kTileRows][kTileBlocks];
};

// Computes the sums over k of a tile. All loops except the one over k are unrolled, so that the sums stay in
// registers; if this function were inlined, the compiler would spill some of them.
template <std::size_t Rows, std::size_t Blocks>
[[gnu::noinline]] void accumulate(const GemmArgs& args, std::size_t row, std::size_t block, Sums& out) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  const std::size_t block_bytes = args.groups * kGemmBytesPerGroup;
  const std::int8_t* left = args.left + row * depth;
  const std::int8_t* right = args.right + block * block_bytes;
  const std::int8_t* right_end = right + block_bytes;
  const __m512i flip = _mm512_set1_epi8(-128);

  // While a panel is in use, each of its tiles prefetches its share of the next panel's cache lines.
  const std::size_t num_tiles = (args.rows + kTileRows - 1) / kTileRows;
  const std::size_t lines_per_group = (kTileBlocks + num_tiles - 1) / num_tiles;
  const std::size_t first_block = row / kTileRows * lines_per_group % kTileBlocks;
  const std::int8_t* ahead = right + (kTileBlocks + first_block) * block_bytes;

  __m512i sums[Rows][Blocks];
#pragma GCC unroll 8
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 3
    for (std::size_t b = 0; b < Blocks; ++b) sums[m][b] = _mm512_set1_epi32(-128 * args.left_sums[row + m]);
  }
  for (; right != right_end; right += kGemmBytesPerGroup, left += kGemmDepthPerGroup) {
    for (std::size_t line = 0; line < lines_per_group; ++line, ahead += kGemmBytesPerGroup) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    }
    __m512i weights[Blocks];
#pragma GCC unroll 3
    for (std::size_t b = 0; b < Blocks; ++b) {
      const std::int8_t* source = right + b * block_bytes;
      weights[b] = _mm512_xor_si512(_mm512_loadu_si512(source), flip);
    }
#pragma GCC unroll 8
    for (std::size_t m = 0; m < Rows; ++m) {
      std::int32_t quad;
      std::memcpy(&quad, left + m * depth, sizeof(quad));
      const __m512i activations = _mm512_set1_epi32(quad);
#pragma GCC unroll 3
      for (std::size_t b = 0; b < Blocks; ++b) {
        sums[m][b] = _mm512_dpbusd_epi32(sums[m][b], weights[b], activations);
      }
    }
  }
#pragma GCC unroll 8
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 3
    for (std::size_t b = 0; b < Blocks; ++b) out.of[m][b] = sums[m][b];
  }
}

// Computes the sums of a single row for one block. For a decoded token, loading the weights from memory
// dominates: one stream is faster than three, and partial sums over every fourth group do not wait for each
// other.
__m512i accumulate_row(const GemmArgs& args, std::size_t block) {
  const std::int8_t* right = args.right + block * args.groups * kGemmBytesPerGroup;
  const __m512i flip = _mm512_set1_epi8(-128);
  const auto weights = [&](std::size_t group) {
    const std::int8_t* source = right + group * kGemmBytesPerGroup;
    _mm_prefetch(reinterpret_cast<const char*>(source + kBytesAhead), _MM_HINT_T0);
    return _mm512_xor_si512(_mm512_loadu_si512(source), flip);
  };
  const auto activations = [&](std::size_t group) {
    std::int32_t quad;
    std::memcpy(&quad, args.left + group * kGemmDepthPerGroup, sizeof(quad));
    return _mm512_set1_epi32(quad);
  };

  __m512i sums[kChains] = {_mm512_set1_epi32(-128 * args.left_sums[0])};
  std::size_t group = 0;
  for (; group + kChains <= args.groups; group += kChains) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kChains; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], weights(group + i), activations(group + i));
    }
  }
  for (; group < args.groups; ++group) {
    sums[0] = _mm512_dpbusd_epi32(sums[0], weights(group), activations(group));
  }
  return _mm512_add_epi32(_mm512_add_epi32(sums[0], sums[1]), _mm512_add_epi32(sums[2], sums[3]));
}

void store_sums(const GemmArgs& args, std::size_t row, std::size_t block, __m512i sums) {
  store_columns(args, row, block * kGemmColumnsPerBlock, _mm512_cvtepi32_ps(sums), args.right_scales);
}

template <std::size_t Rows, std::size_t Blocks>
void compute_tile(const GemmArgs& args, std::size_t row, std::size_t block) {
  Sums sums;
  accumulate<Rows, Blocks>(args, row, block, sums);
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t b = 0; b < Blocks; ++b) store_sums(args, row + m, block + b, sums.of[m][b]);
  }
}

template <std::size_t Blocks>
void compute_panel(const GemmArgs& args, std::size_t block) {
  std::size_t row = 0;
  for (; row + kTileRows <= args.rows; row += kTileRows) compute_tile<kTileRows, Blocks>(args, row, block);
  switch (args.rows - row) {
    case 1:
      return compute_tile<1, Blocks>(args, row, block);
    case 2:
      return compute_tile<2, Blocks>(args, row, block);
    case 3:
      return compute_tile<3, Blocks>(args, row, block);
    case 4:
      return compute_tile<4, Blocks>(args, row, block);
    case 5:
      return compute_tile<5, Blocks>(args, row, block);
    case 6:
      return compute_tile<6, Blocks>(args, row, block);
    case 7:
      return compute_tile<7, Blocks>(args, row, block);
    default:
      return;
  }
}

}  // namespace

void gemm_f32_s8row_s8col_avx512vnni(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  if (args.rows == 1) {
    for (std::size_t block = block_begin; block < block_end; ++block) {
      store_sums(args, 0, block, accumulate_row(args, block));
    }
    return;
  }
  std::size_t block = block_begin;
  for (; block + kTileBlocks <= block_end; block += kTileBlocks) compute_panel<kTileBlocks>(args, block);
  if (block_end - block == 2) compute_panel<2>(args, block);
  if (block_end - block == 1) compute_panel<1>(args, block);
}

}  // namespace chunkrt
