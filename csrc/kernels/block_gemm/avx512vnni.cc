// block_gemm with AVX-512 VNNI: vpdpbusd takes the 4-bit weights as its unsigned operand and the activations
// as its signed operand. A block of 32 values along k takes 8 such instructions for 16 columns of a row,
// without a correction.
#include <immintrin.h>

#include <cstring>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/store_avx512.h"

namespace chunkrt {
namespace {

// The values of a tile and the sums of its current block fill 24 of the 32 registers: each loaded activation
// is used 3 times, each loaded weight 4 times.
constexpr std::size_t kTileRows = 4;
constexpr std::size_t kTileBlocks = 3;
constexpr std::size_t kLineBytes =
    64;  // 8 values along k of 16 columns, or the scales and minima of 16 columns
constexpr std::size_t kLinesPerBlock = kBlockBytes / kLineBytes;
constexpr std::size_t kDepthPerLine = kBlockDepth / kLinesPerBlock;
constexpr std::size_t kScalesPerBlock = 2 * kBlockColumns;

struct Values {
  __m512 of[kTileRows][kTileBlocks];
};

std::size_t ceil_divide(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }

// Broadcasts four values along k of one row to all lanes.
__m512i broadcast(const std::int8_t* source) {
  std::int32_t quad;
  std::memcpy(&quad, source, sizeof(quad));
  return _mm512_set1_epi32(quad);
}

// Adds the products of 4 values along k of each column to the sums.
template <std::size_t Rows, std::size_t Blocks>
[[gnu::always_inline]] inline void add_products(__m512i (&sums)[Rows][Blocks],
                                                const __m512i (&weights)[Blocks], const std::int8_t* left,
                                                std::size_t depth) {
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) {
    const __m512i activations = broadcast(left + m * depth);
#pragma GCC unroll 3
    for (std::size_t b = 0; b < Blocks; ++b) {
      sums[m][b] = _mm512_dpbusd_epi32(sums[m][b], weights[b], activations);
    }
  }
}

// Prefetches lines of the next panel while this panel is in use. Each tile fetches its share, a few lines in
// each block of depth.
class Prefetcher {
 public:
  Prefetcher(const void* next_panel, std::size_t lines_per_block, std::size_t tile, std::size_t num_tiles,
             std::size_t depth_blocks)
      : lines_(ceil_divide(lines_per_block, num_tiles)),
        next_(static_cast<const char*>(next_panel) +
              tile * lines_ % lines_per_block * depth_blocks * kLineBytes) {}

  void fetch() {
    for (std::size_t line = 0; line < lines_; ++line, next_ += kLineBytes) _mm_prefetch(next_, _MM_HINT_T0);
  }

 private:
  std::size_t lines_;
  const char* next_;
};

// The values of a tile. All loops except the one over blocks of depth are unrolled, so that values and sums
// stay in registers; if this function were inlined, the compiler would spill some of them.
template <std::size_t Rows, std::size_t Blocks>
[[gnu::noinline]] void accumulate(const BlockGemmArgs& args, std::size_t row, std::size_t block,
                                  Values& out) {
  const std::size_t depth = args.depth_blocks * kBlockDepth;
  const std::size_t panel_bytes = args.depth_blocks * kBlockBytes;
  const std::size_t panel_scales = args.depth_blocks * kScalesPerBlock;
  const std::int8_t* left = args.left + row * depth;
  const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
  const std::uint8_t* right = args.right + block * panel_bytes;
  const std::uint8_t* right_end = right + panel_bytes;
  const std::uint16_t* right_scales = args.right_scales + block * panel_scales;
  const __m512i low_half = _mm512_set1_epi8(15);

  const std::size_t tile = row / kTileRows, num_tiles = ceil_divide(args.rows, kTileRows);
  Prefetcher weights_ahead(right + Blocks * panel_bytes, Blocks * kLinesPerBlock, tile, num_tiles,
                           args.depth_blocks);
  Prefetcher scales_ahead(right_scales + Blocks * panel_scales, Blocks, tile, num_tiles, args.depth_blocks);

  __m512 values[Rows][Blocks];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 3
    for (std::size_t b = 0; b < Blocks; ++b) values[m][b] = _mm512_setzero_ps();
  }
  for (; right != right_end; right += kBlockBytes, right_scales += kScalesPerBlock, ++left_sums) {
    weights_ahead.fetch();
    scales_ahead.fetch();
    __m512i sums[Rows][Blocks];
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 3
      for (std::size_t b = 0; b < Blocks; ++b) sums[m][b] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (std::size_t line = 0; line < kLinesPerBlock; ++line, left += kDepthPerLine) {
      __m512i weights[Blocks];
#pragma GCC unroll 3
      for (std::size_t b = 0; b < Blocks; ++b) {
        const std::uint8_t* source = right + b * panel_bytes + line * kLineBytes;
        weights[b] = _mm512_and_si512(_mm512_loadu_si512(source), low_half);
      }
      add_products(sums, weights, left, depth);
#pragma GCC unroll 3
      for (std::size_t b = 0; b < Blocks; ++b) {
        const std::uint8_t* source = right + b * panel_bytes + line * kLineBytes;
        weights[b] = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(source), 4), low_half);
      }
      add_products(sums, weights, left + kDepthPerLine / 2, depth);
    }
#pragma GCC unroll 3
    for (std::size_t b = 0; b < Blocks; ++b) {
      const __m512 scales = widen(right_scales + b * panel_scales);
      const __m512 minima = widen(right_scales + b * panel_scales + kBlockColumns);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m512 left_sum = _mm512_cvtepi32_ps(_mm512_set1_epi32(left_sums[m * args.depth_blocks]));
        values[m][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m][b]), scales, values[m][b]);
        values[m][b] = _mm512_fmadd_ps(left_sum, minima, values[m][b]);
      }
    }
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 3
    for (std::size_t b = 0; b < Blocks; ++b) out.of[m][b] = values[m][b];
  }
}

template <std::size_t Rows, std::size_t Blocks>
void compute_tile(const BlockGemmArgs& args, std::size_t row, std::size_t block) {
  Values values;
  accumulate<Rows, Blocks>(args, row, block, values);
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t b = 0; b < Blocks; ++b) {
      store_columns(args, row + m, (block + b) * kBlockColumns, values.of[m][b], nullptr);
    }
  }
}

template <std::size_t Blocks>
void compute_panel(const BlockGemmArgs& args, std::size_t block) {
  constexpr void (*kComputeTile[])(const BlockGemmArgs&, std::size_t, std::size_t) = {
      compute_tile<1, Blocks>, compute_tile<2, Blocks>, compute_tile<3, Blocks>, compute_tile<4, Blocks>};
  for (std::size_t row = 0; row < args.rows; row += kTileRows) {
    const std::size_t left = args.rows - row;
    kComputeTile[(left < kTileRows ? left : kTileRows) - 1](args, row, block);
  }
}

}  // namespace

void block_gemm_f32_s8row_u4block_avx512vnni(const BlockGemmArgs& args, std::size_t block_begin,
                                             std::size_t block_end) {
  std::size_t block = block_begin;
  // With few rows, loading the weights from memory dominates, and one stream is faster than three.
  if (args.rows < kTileRows) {
    for (; block < block_end; ++block) compute_panel<1>(args, block);
  }
  for (; block + kTileBlocks <= block_end; block += kTileBlocks) compute_panel<kTileBlocks>(args, block);
  if (block_end - block == 2) compute_panel<2>(args, block);
  if (block_end - block == 1) compute_panel<1>(args, block);
}

}  // namespace chunkrt
