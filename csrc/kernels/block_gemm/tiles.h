// block_gemm with matrix tiles: loops that are shared by all tile implementations, over a few operations on
// tiles and on values.
//
// A panel of a few column blocks is unpacked into scratch once for all rows. Each block of depth becomes a
// right tile of int8, [8, 16 columns, 4], with its scales and minima in float32. The panel is multiplied by
// 16 rows at a time. 32 values along k of these rows form a left tile, without rearrangement; the product of
// a left and a right tile is 16 x 16 sums in int32. The sums are stored to memory a few blocks of depth
// before they are scaled and added to the 16 x 16 values in float32, which stay in registers over the
// complete depth.
//
// kernels/gemm/tiles.h describes `Tiles`; left tiles are 32 bytes wide here. `Values` holds the values of 16
// rows by 16 columns, initially 0, and provides the other vector operations:
//   unpack(packed, out)               a block [4, 16, 4] of 4-bit integers to int8 [8, 16, 4]
//   widen_scales(scales, out)         float16 [2, 16] to float32
//   widen_sums(sums, stride, num_rows, out)   int32, one a row, to float32 [16]: zeros past num_rows
//   add(sums, left_sums, scales)      a block of depth: int32 [16, 16], float32 [16], float32 [2, 16]
//   store(args, row, num_rows, block) the end of block_gemm
// amx.cc implements these operations; for tests on any processor, plain loops implement them.
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <atomic>

#include "kernels/block_gemm/block_gemm.h"
#include "kernels/tile_pairs.h"

namespace chunkrt {
namespace {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kUnpackedBytes = 2 * kBlockBytes;
constexpr std::size_t kScalesPerBlock = 2 * kBlockColumns;

// With fewer rows than this, another kernel computes the product, because unpacking a panel does not pay off.
constexpr std::size_t kFewestRows = kTileRows / 2;

constexpr std::size_t kSumTile = 0;

// Number of blocks of depth by which products are ahead of their use, because the result of a tile store
// cannot be loaded immediately.
constexpr std::size_t kBlocksAhead = 3;
using TileSums = std::int32_t[kTileRows][kBlockColumns];
using SumsAhead = TileSums[kBlocksAhead + 1];

std::size_t smaller(std::size_t left, std::size_t right) { return left < right ? left : right; }

// The blocks [begin, begin + num_blocks) of columns, unpacked, and the sums of the current rows.
struct TilePanel {
  std::int8_t* weights;  // int8 [num_blocks, depth_blocks, 8, 16, 4]
  float* scales;         // float32 [num_blocks, depth_blocks, 2, 16]
  float* left_sums;      // float32 [depth_blocks, 16 rows]
  std::size_t begin;
  std::size_t num_blocks;
};

template <typename Values>
TilePanel unpack_panel(const BlockGemmArgs& args, std::size_t begin, std::size_t end) {
  const std::size_t first = begin * args.depth_blocks, count = (end - begin) * args.depth_blocks;
  float* const scales = args.scratch + count * kUnpackedBytes / sizeof(float);
  const TilePanel panel = {.weights = reinterpret_cast<std::int8_t*>(args.scratch),
                           .scales = scales,
                           .left_sums = scales + count * kScalesPerBlock,
                           .begin = begin,
                           .num_blocks = end - begin};
  for (std::size_t b = 0; b < count; ++b) {
    Values::unpack(args.right + (first + b) * kBlockBytes, panel.weights + b * kUnpackedBytes);
    Values::widen_scales(args.right_scales + (first + b) * kScalesPerBlock,
                         panel.scales + b * kScalesPerBlock);
  }
  return panel;
}

// While a panel is in use, each of its tiles of rows prefetches its share of the next panel's cache lines.
struct Ahead {
  Ahead(const BlockGemmArgs& args, const TilePanel& panel, std::size_t row, std::size_t block) {
    constexpr std::size_t kLines = kBlockBytes / kLineBytes;
    const std::size_t num_pieces = (args.rows + kTileRows - 1) / kTileRows;
    const std::size_t share = (kLines + num_pieces - 1) / num_pieces;
    const std::size_t first = smaller(row / kTileRows * share, kLines);
    lines = smaller(share, kLines - first);
    const std::size_t next = (panel.begin + panel.num_blocks + block) * args.depth_blocks;
    weights = args.right + next * kBlockBytes + first * kLineBytes;
    scales = row == 0 ? args.right_scales + next * kScalesPerBlock : nullptr;
  }

  template <typename Tiles>
  void fetch(Tiles& tiles, std::size_t depth_block) const {
    for (std::size_t line = 0; line < lines; ++line) {
      tiles.prefetch(weights + depth_block * kBlockBytes + line * kLineBytes);
    }
    if (scales != nullptr) tiles.prefetch(scales + depth_block * kScalesPerBlock);
  }

  const std::uint8_t* weights;
  const std::uint16_t* scales;
  std::size_t lines;  // for one block of depth
};

// Computes the values of up to 16 rows and the columns of one block of a panel.
template <typename Tiles, typename Values>
void multiply_block(Tiles& tiles, const BlockGemmArgs& args, const TilePanel& panel, std::size_t row,
                    std::size_t num_rows, std::size_t block, SumsAhead& sums) {
  const std::size_t depth_blocks = args.depth_blocks, stride = depth_blocks * kBlockDepth;
  const std::int8_t* const left = args.left + row * stride;
  const std::int8_t* const weights = panel.weights + block * depth_blocks * kUnpackedBytes;
  const float* const scales = panel.scales + block * depth_blocks * kScalesPerBlock;
  const float* const left_sums = panel.left_sums;
  const Ahead ahead(args, panel, row, block);

  const auto multiply = [&](std::size_t b) {
    tiles.template zero<kSumTile>();
    tiles.template load<kLeftTile>(left + b * kBlockDepth, stride);
    tiles.template load<kRightTile>(weights + b * kUnpackedBytes, kLineBytes);
    tiles.template multiply<kSumTile, kLeftTile, kRightTile>();
    tiles.template store<kSumTile>(&sums[b % (kBlocksAhead + 1)][0][0], sizeof(sums[0][0]));
  };

  Values values;
  for (std::size_t b = 0; b < smaller(kBlocksAhead, depth_blocks); ++b) multiply(b);
  for (std::size_t b = 0; b < depth_blocks; ++b) {
    if (b + kBlocksAhead < depth_blocks) multiply(b + kBlocksAhead);
    ahead.fetch(tiles, b);
    values.add(&sums[b % (kBlocksAhead + 1)][0][0], left_sums + b * kTileRows, scales + b * kScalesPerBlock);
  }
  values.store(args, row, num_rows, panel.begin + block);
}

// Computes all blocks of a panel for rows [row, end), which are complete tiles or fewer rows than one tile.
template <typename Tiles, typename Values>
void multiply_rows(Tiles& tiles, const BlockGemmArgs& args, const TilePanel& panel, std::size_t row,
                   std::size_t end, SumsAhead& sums) {
  const std::size_t num_rows = smaller(end - row, kTileRows);
  tiles.template configure<kBlockDepth>(num_rows);
  for (; row < end; row += num_rows) {
    for (std::size_t b = 0; b < args.depth_blocks; ++b) {
      Values::widen_sums(args.left_sums + row * args.depth_blocks + b, args.depth_blocks, num_rows,
                         panel.left_sums + b * kTileRows);
    }
    for (std::size_t block = 0; block < panel.num_blocks; ++block) {
      multiply_block<Tiles, Values>(tiles, args, panel, row, num_rows, block, sums);
    }
  }
}

// Computes the blocks [block_begin, block_end) of all rows; `few_rows` computes them if the rows are few.
template <typename Tiles, typename Values>
void multiply_by_tiles(const BlockGemmArgs& args, std::size_t block_begin, std::size_t block_end,
                       BlockGemmFunction* few_rows) {
  if (args.rows < kFewestRows) return few_rows(args, block_begin, block_end);
  const std::size_t panel_blocks = most_panel_blocks(args.depth_blocks);
  const std::size_t whole = args.rows / kTileRows * kTileRows;
  // A tile with fewer rows also computes the sums of its missing rows, but does not store them.
  alignas(kLineBytes) SumsAhead sums = {};
  Tiles tiles;
  for (std::size_t block = block_begin; block < block_end; block += panel_blocks) {
    const TilePanel panel = unpack_panel<Values>(args, block, smaller(block + panel_blocks, block_end));
    // Compilers do not know that loads of tiles read memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (whole > 0) multiply_rows<Tiles, Values>(tiles, args, panel, 0, whole, sums);
    if (whole < args.rows) multiply_rows<Tiles, Values>(tiles, args, panel, whole, args.rows, sums);
  }
}

}  // namespace
}  // namespace chunkrt
