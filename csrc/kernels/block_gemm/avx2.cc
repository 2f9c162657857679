// block_gemm with AVX2: vpmaddubsw takes the 4-bit weights as its unsigned operand and the activations as its
// signed operand, and adds adjacent products in int16.
//
// No int16 can overflow: a pair of products is at most 2 * 15 * 127 = 3810 in magnitude, and a block of 32
// values along k adds 8 pairs in one int16, which is at most 30480 < 32767. So the pairs of a block are added
// in int16, and only their sums are widened, by a vpmaddwd with ones.
//
// For many rows, each block of columns is unpacked once. Then 16 columns of 4 rows are computed at a time, so
// that each loaded activation is used twice.
#include <immintrin.h>

#include <cstring>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/store_avx2.h"

namespace chunkrt {
namespace {

// With 4 rows the values and the sums of the current block fill 8 of the 16 registers; weights, two products
// and two constants take 6 more.
constexpr std::size_t kTileRows = 4;
constexpr std::size_t kTileColumns = 8;
constexpr std::size_t kTiles = kBlockColumns / kTileColumns;
constexpr std::size_t kDepthPerGroup = 8;
constexpr std::size_t kGroupBytes = 64;
constexpr std::size_t kTileBytesPerGroup = kGroupBytes / kTiles;
constexpr std::size_t kGroups = kBlockDepth / kDepthPerGroup;

// With fewer rows than this, unpacking does not pay off.
constexpr std::size_t kFewestPanelRows = 8;

struct Values {
  __m256 of[kTileRows];
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

// The values of a tile of 8 columns. All loops except the one over blocks of depth are unrolled, so that
// values and sums stay in registers; if this function were inlined, the compiler would spill some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const BlockGemmArgs& args, std::size_t row, const std::uint8_t* right,
                                  const std::uint16_t* right_scales, std::size_t blocks_ahead, Values& out) {
  const std::size_t depth = args.depth_blocks * kBlockDepth;
  const std::int8_t* left = args.left + row * depth;
  const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
  const std::uint8_t* right_end = right + args.depth_blocks * kBlockBytes;
  const __m256i low_half = _mm256_set1_epi8(15);

  __m256 values[Rows];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) values[m] = _mm256_setzero_ps();
  for (; right != right_end; right += kBlockBytes, right_scales += 2 * kBlockColumns) {
    _mm_prefetch(reinterpret_cast<const char*>(right_scales + blocks_ahead * 2 * kBlockColumns), _MM_HINT_T0);
    __m256i sums[Rows];  // int16: two sums for each column
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) sums[m] = _mm256_setzero_si256();
    // If this loop is unrolled, GCC reorders the additions and keeps all products of the block until the end.
#pragma GCC unroll 1
    for (std::size_t group = 0; group < kGroups; ++group, left += kDepthPerGroup) {
      const std::uint8_t* source = right + group * kGroupBytes;
      _mm_prefetch(reinterpret_cast<const char*>(source + blocks_ahead * kBlockBytes), _MM_HINT_T0);
      const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
      const __m256i low = _mm256_and_si256(weights, low_half);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(weights, 4), low_half);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256i low_pairs = _mm256_maddubs_epi16(low, broadcast(left + m * depth));
        const __m256i high_pairs = _mm256_maddubs_epi16(high, broadcast(left + m * depth + 4));
        sums[m] = _mm256_add_epi16(sums[m], _mm256_add_epi16(low_pairs, high_pairs));
      }
    }
    const __m256 scales = widen(right_scales), minima = widen(right_scales + kBlockColumns);
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m256 left_sum = _mm256_cvtepi32_ps(_mm256_set1_epi32(left_sums[m * args.depth_blocks]));
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[m], _mm256_set1_epi16(1)));
      values[m] = _mm256_fmadd_ps(sum, scales, values[m]);
      values[m] = _mm256_fmadd_ps(left_sum, minima, values[m]);
    }
    ++left_sums;
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m) out.of[m] = values[m];
}

template <std::size_t Rows>
void compute_tile(const BlockGemmArgs& args, std::size_t row, std::size_t column) {
  const std::size_t block = column / kBlockColumns * args.depth_blocks;
  const std::size_t tile = column % kBlockColumns / kTileColumns;
  // While a panel is in use, its first tile prefetches the next panel; only that tile waits for memory.
  const std::size_t blocks_ahead = row == 0 && tile == 0 ? args.depth_blocks : 0;
  Values values;
  accumulate<Rows>(args, row, args.right + block * kBlockBytes + tile * kTileBytesPerGroup,
                   args.right_scales + block * 2 * kBlockColumns + tile * kTileColumns, blocks_ahead, values);
  for (std::size_t m = 0; m < Rows; ++m) store_columns(args, row + m, column, values.of[m], nullptr);
}

__m256i load(const std::uint8_t* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

// Returns the value, and stops GCC from moving its computation to a later place. GCC would compute all
// products before all sums, and would have no registers for them.
__m256i keep_here(__m256i value) {
  asm("" : "+x"(value));
  return value;
}

// A block of columns, unpacked into scratch.
struct Panel {
  std::uint8_t* weights;  // uint8 [depth_blocks, 8, 16 columns, 4]
  float* scales;          // float32 [depth_blocks, 2, 16 columns]
};

Panel unpack_panel(const BlockGemmArgs& args, std::size_t block) {
  const Panel panel = {reinterpret_cast<std::uint8_t*>(args.scratch),
                       args.scratch + args.depth_blocks * 2 * kBlockBytes / sizeof(float)};
  const __m256i low_half = _mm256_set1_epi8(15);
  const std::uint8_t* right = args.right + block * args.depth_blocks * kBlockBytes;
  std::uint8_t* out = panel.weights;
  const auto store = [&](std::size_t to, __m256i q) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + to), _mm256_and_si256(q, low_half));
  };
  for (std::size_t group = 0; group < args.depth_blocks * kGroups; ++group) {
    const __m256i first = load(right), second = load(right + 32);
    store(0, first);
    store(32, second);
    store(64, _mm256_srli_epi16(first, 4));
    store(96, _mm256_srli_epi16(second, 4));
    right += kGroupBytes;
    out += 2 * kGroupBytes;
  }
  const std::size_t num_scales = args.depth_blocks * 2 * kBlockColumns;
  const std::uint16_t* right_scales = args.right_scales + block * num_scales;
  for (std::size_t i = 0; i < num_scales; i += kTileColumns) {
    _mm256_store_ps(panel.scales + i, widen(right_scales + i));
  }
  return panel;
}

// Computes Rows rows of an unpacked block. The sums of a block of depth stay in registers, and the values in
// the first-level cache.
template <std::size_t Rows>
[[gnu::noinline]] void compute_panel(const BlockGemmArgs& args, std::size_t row, std::size_t block,
                                     const Panel& panel) {
  const std::size_t depth = args.depth_blocks * kBlockDepth;
  const std::int8_t* left = args.left + row * depth;
  const std::int32_t* left_sums = args.left_sums + row * args.depth_blocks;
  const std::uint8_t* right = panel.weights;
  const float* scales = panel.scales;
  __m256 values[Rows][kTiles] = {};
  for (std::size_t b = 0; b < args.depth_blocks; ++b, scales += 2 * kBlockColumns) {
    __m256i sums[Rows][kTiles] = {};  // int16: two sums for each column
#pragma GCC unroll 8
    for (std::size_t quad = 0; quad < kBlockDepth; quad += 4, right += kGroupBytes, left += 4) {
      const __m256i weights[kTiles] = {load(right), load(right + kTileBytesPerGroup)};
#pragma GCC unroll 4
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256i activations = broadcast(left + m * depth);
#pragma GCC unroll 2
        for (std::size_t tile = 0; tile < kTiles; ++tile) {
          const __m256i pairs = _mm256_maddubs_epi16(weights[tile], activations);
          sums[m][tile] = keep_here(_mm256_add_epi16(sums[m][tile], pairs));
        }
      }
    }
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m256 left_sum = _mm256_cvtepi32_ps(_mm256_set1_epi32(left_sums[m * args.depth_blocks + b]));
#pragma GCC unroll 2
      for (std::size_t tile = 0; tile < kTiles; ++tile) {
        const float* of_tile = scales + tile * kTileColumns;
        const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[m][tile], _mm256_set1_epi16(1)));
        const __m256 scaled = _mm256_fmadd_ps(sum, _mm256_load_ps(of_tile), values[m][tile]);
        values[m][tile] = _mm256_fmadd_ps(left_sum, _mm256_load_ps(of_tile + kBlockColumns), scaled);
      }
    }
  }
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t tile = 0; tile < kTiles; ++tile) {
      store_columns(args, row + m, block * kBlockColumns + tile * kTileColumns, values[m][tile], nullptr);
    }
  }
}

void compute_by_panels(const BlockGemmArgs& args, std::size_t begin, std::size_t end) {
  constexpr void (*kComputePanel[])(const BlockGemmArgs&, std::size_t, std::size_t, const Panel&) = {
      compute_panel<1>, compute_panel<2>, compute_panel<3>, compute_panel<4>};
  for (std::size_t block = begin; block < end; ++block) {
    const Panel panel = unpack_panel(args, block);
    for (std::size_t row = 0; row < args.rows; row += kTileRows) {
      const std::size_t left = args.rows - row;
      kComputePanel[(left < kTileRows ? left : kTileRows) - 1](args, row, block, panel);
    }
  }
}

// Number of column blocks that a single row is multiplied by at once; they share the row's broadcasts.
// Contiguous blocks are processed in order, so that they form one stream for the prefetchers.
constexpr std::size_t kRowBlocks = 3;

// Multiplies a single row by the columns of `block` and of the blocks that follow it at a fixed distance.
template <std::size_t Blocks>
[[gnu::noinline]] void compute_row(const BlockGemmArgs& args, std::size_t block, std::size_t distance) {
  constexpr std::size_t kValues = Blocks * kTiles;
  const std::uint8_t* right = args.right + block * args.depth_blocks * kBlockBytes;
  const std::uint16_t* right_scales = args.right_scales + block * args.depth_blocks * 2 * kBlockColumns;
  const std::size_t stride = distance * args.depth_blocks * kBlockBytes;
  const std::size_t scales_stride = distance * args.depth_blocks * 2 * kBlockColumns;
  const std::int8_t* left = args.left;
  const __m256i low_half = _mm256_set1_epi8(15);

  __m256 values[kValues];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kValues; ++i) values[i] = _mm256_setzero_ps();
  for (std::size_t depth = 0; depth < args.depth_blocks; ++depth) {
    __m256i sums[kValues];  // int16: two sums for each column
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kValues; ++i) sums[i] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (std::size_t group = 0; group < kGroups; ++group, left += kDepthPerGroup, right += kGroupBytes) {
      const __m256i low_left = broadcast(left), high_left = broadcast(left + 4);
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kValues; ++i) {
        const std::uint8_t* source = right + i / kTiles * stride + i % kTiles * kTileBytesPerGroup;
        const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        const __m256i low = _mm256_and_si256(weights, low_half);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(weights, 4), low_half);
        sums[i] = _mm256_add_epi16(sums[i], _mm256_add_epi16(_mm256_maddubs_epi16(low, low_left),
                                                             _mm256_maddubs_epi16(high, high_left)));
      }
    }
    const __m256 left_sum = _mm256_cvtepi32_ps(_mm256_set1_epi32(args.left_sums[depth]));
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kValues; ++i) {
      const std::uint16_t* scales = right_scales + i / kTiles * scales_stride + i % kTiles * kTileColumns;
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[i], _mm256_set1_epi16(1)));
      values[i] = _mm256_fmadd_ps(sum, widen(scales), values[i]);
      values[i] = _mm256_fmadd_ps(left_sum, widen(scales + kBlockColumns), values[i]);
    }
    right_scales += 2 * kBlockColumns;
  }
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kValues; ++i) {
    const std::size_t column = (block + i / kTiles * distance) * kBlockColumns + i % kTiles * kTileColumns;
    store_columns(args, 0, column, values[i], nullptr);
  }
}

void compute_blocks_of_row(const BlockGemmArgs& args, std::size_t begin, std::size_t end) {
  const std::size_t distance = (end - begin) / kRowBlocks;
  for (std::size_t i = 0; i < distance; ++i) compute_row<kRowBlocks>(args, begin + i, distance);
  for (begin += distance * kRowBlocks; begin < end; ++begin) compute_row<1>(args, begin, 0);
}

}  // namespace

void block_gemm_f32_s8row_u4block_avx2(const BlockGemmArgs& args, std::size_t block_begin,
                                       std::size_t block_end) {
  constexpr void (*kComputeTile[])(const BlockGemmArgs&, std::size_t, std::size_t) = {
      compute_tile<1>, compute_tile<2>, compute_tile<3>, compute_tile<4>};
  if (args.rows == 1) return compute_blocks_of_row(args, block_begin, block_end);
  if (args.rows >= kFewestPanelRows) return compute_by_panels(args, block_begin, block_end);
  const std::size_t end = block_end * kBlockColumns < args.columns ? block_end * kBlockColumns : args.columns;
  for (std::size_t column = block_begin * kBlockColumns; column < end; column += kTileColumns) {
    for (std::size_t row = 0; row < args.rows; row += kTileRows) {
      const std::size_t left = args.rows - row;
      kComputeTile[(left < kTileRows ? left : kTileRows) - 1](args, row, column);
    }
  }
}

}  // namespace chunkrt
