// block_gemm with AVX-VNNI: the 256-bit vpdpbusd takes the 4-bit weights as its unsigned operand and the
// activations as its signed operand. A block of 32 values along k takes 8 such instructions for 8 columns of
// a row, without a correction.
#include <immintrin.h>

#include <cstring>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/store_avx2.h"

namespace chunkrt {
namespace {

// With 3 rows the values of 16 columns and the sums of their current block fill 12 of the 16 registers; two
// registers of weights, an activation and a constant take the rest.
constexpr std::size_t kTileRows = 3;
constexpr std::size_t kVectorColumns = 8;
constexpr std::size_t kVectors = kBlockColumns / kVectorColumns;
constexpr std::size_t kLineBytes = 64;  // 8 values along k of 16 columns
constexpr std::size_t kLinesPerBlock = kBlockBytes / kLineBytes;
constexpr std::size_t kDepthPerLine = kBlockDepth / kLinesPerBlock;
constexpr std::size_t kScalesPerBlock = 2 * kBlockColumns;

struct Values {
  __m256 of[kTileRows][kVectors];
};

// Broadcasts four values along k of one row to all lanes.
__m256i broadcast(const std::int8_t* source) {
  std::int32_t quad;
  std::memcpy(&quad, source, sizeof(quad));
  return _mm256_set1_epi32(quad);
}

__m256 widen(const std::uint16_t* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

// Adds the products of 4 values along k of each column to the sums.
template <std::size_t Rows>
[[gnu::always_inline]] inline void add_products(__m256i (&sums)[Rows][kVectors],
                                                const __m256i (&weights)[kVectors], const std::int8_t* left,
                                                std::size_t depth) {
#pragma GCC unroll 3
  for (std::size_t m = 0; m < Rows; ++m) {
    const __m256i activations = broadcast(left + m * depth);
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) {
      sums[m][v] = _mm256_dpbusd_avx_epi32(sums[m][v], weights[v], activations);
    }
  }
}

// The values of a tile of 16 columns. All loops except the one over blocks of depth are unrolled, so that
// values and sums stay in registers; if this function were inlined, the compiler would spill some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const BlockGemmArgs& args, std::size_t row, std::size_t block,
                                  Values& out) {
  const std::size_t depth = args.depth_blocks * kBlockDepth;
  const std::int8_t* left = args.left + row * depth;
  const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
  const std::uint8_t* right = args.right + block * args.depth_blocks * kBlockBytes;
  const std::uint8_t* right_end = right + args.depth_blocks * kBlockBytes;
  const std::uint16_t* right_scales = args.right_scales + block * args.depth_blocks * kScalesPerBlock;
  const __m256i low_half = _mm256_set1_epi8(15);
  // While a panel is in use, its first tile prefetches the next panel; only that tile waits for memory.
  const std::size_t blocks_ahead = row == 0 ? args.depth_blocks : 0;

  __m256 values[Rows][kVectors];
#pragma GCC unroll 3
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) values[m][v] = _mm256_setzero_ps();
  }
  for (; right != right_end; right += kBlockBytes, right_scales += kScalesPerBlock, ++left_sums) {
    _mm_prefetch(reinterpret_cast<const char*>(right_scales + blocks_ahead * kScalesPerBlock), _MM_HINT_T0);
    __m256i sums[Rows][kVectors];
#pragma GCC unroll 3
    for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) sums[m][v] = _mm256_setzero_si256();
    }
#pragma GCC unroll 4
    for (std::size_t line = 0; line < kLinesPerBlock; ++line, left += kDepthPerLine) {
      const std::uint8_t* source = right + line * kLineBytes;
      _mm_prefetch(reinterpret_cast<const char*>(source + blocks_ahead * kBlockBytes), _MM_HINT_T0);
      __m256i weights[kVectors];
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source) + v);
        weights[v] = _mm256_and_si256(both, low_half);
      }
      add_products(sums, weights, left, depth);
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source) + v);
        weights[v] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
      }
      add_products(sums, weights, left + kDepthPerLine / 2, depth);
    }
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) {
      const __m256 scales = widen(right_scales + v * kVectorColumns);
      const __m256 minima = widen(right_scales + kBlockColumns + v * kVectorColumns);
#pragma GCC unroll 3
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256 left_sum = _mm256_cvtepi32_ps(_mm256_set1_epi32(left_sums[m * args.depth_blocks]));
        values[m][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m][v]), scales, values[m][v]);
        values[m][v] = _mm256_fmadd_ps(left_sum, minima, values[m][v]);
      }
    }
  }
#pragma GCC unroll 3
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) out.of[m][v] = values[m][v];
  }
}

template <std::size_t Rows>
void compute_tile(const BlockGemmArgs& args, std::size_t row, std::size_t block) {
  Values values;
  accumulate<Rows>(args, row, block, values);
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      store_columns(args, row + m, block * kBlockColumns + v * kVectorColumns, values.of[m][v], nullptr);
    }
  }
}

}  // namespace

void block_gemm_f32_s8row_u4block_avxvnni(const BlockGemmArgs& args, std::size_t block_begin,
                                          std::size_t block_end) {
  constexpr void (*kComputeTile[])(const BlockGemmArgs&, std::size_t, std::size_t) = {
      compute_tile<1>, compute_tile<2>, compute_tile<3>};
  for (std::size_t block = block_begin; block < block_end; ++block) {
    for (std::size_t row = 0; row < args.rows; row += kTileRows) {
      const std::size_t left = args.rows - row;
      kComputeTile[(left < kTileRows ? left : kTileRows) - 1](args, row, block);
    }
  }
}

}  // namespace chunkrt
