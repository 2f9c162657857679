// gemm with matrix tiles: loops that are shared by all tile implementations, over a few operations on eight
// tiles.
//
// A tile is 16 rows of 64 bytes. A left tile holds 64 values along k of 16 activation rows, without
// rearrangement. A right tile holds 16 groups of a packed block, also without rearrangement. The product of a
// left and a right tile, 16 x 16 sums in int32, is added to a third tile.
//
// `Tiles` provides configure(rows), which sets the number of rows of sum and activation tiles (at most 16)
// and zeroes all tiles, and the operations zero, load, multiply and store on tiles that are named by their
// numbers. The destructor of `Tiles` releases the tiles. The function `store` takes the 16 sums of one row of
// a block. `Tiles` is AmxTiles (kernels/tiles_amx.h) or, for tests on any processor, a portable equivalent.
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <atomic>
#include <cstring>

#include "kernels/gemm/gemm.h"
#include "kernels/tile_pairs.h"

namespace chunkrt {
namespace {

constexpr std::size_t kTileGroups = kTileBytes / kGemmDepthPerGroup;

// A product of tiles takes the same time for 1 row and for 16 rows. With fewer rows than this, another kernel
// computes the product.
constexpr std::size_t kFewestRows = kTileRows / 2;

static_assert(kGemmBytesPerGroup == kTileBytes && kGemmColumnsPerBlock == kTileRows);

using TileSums = std::int32_t[kTilesDown * kTileRows][kTilesAcross * kGemmColumnsPerBlock];

// Copies of the last groups if the depth is not a multiple of a tile's depth. They are padded to a complete
// tile, because a load past the end of the weights might touch unmapped memory. Activations past the depth
// are zero, so the values of the padding do not matter.
struct DepthEnd {
  alignas(kTileBytes) std::int8_t left[kTilesDown][kTileRows][kTileBytes];
  alignas(kTileBytes) std::int8_t right[kTilesAcross][kTileGroups][kGemmBytesPerGroup];
};

// The products of `num_rows` rows (at most 16 in each of Down tiles, as configured) and Across blocks.
template <std::size_t Down, std::size_t Across, typename Tiles>
void multiply_tiles(Tiles& tiles, const GemmArgs& args, std::size_t row, std::size_t num_rows,
                    std::size_t block, TileSums& sums) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  const std::size_t block_bytes = args.groups * kGemmBytesPerGroup;
  const std::int8_t* left = args.left + row * depth;
  const std::int8_t* right = args.right + block * block_bytes;

  // While a panel is in use, each of its tiles prefetches its share of the next panel's cache lines.
  const std::size_t num_pieces = (args.rows + Down * kTileRows - 1) / (Down * kTileRows);
  const std::size_t lines = (Across * kTileGroups + num_pieces - 1) / num_pieces;
  const std::int8_t* ahead = right + Across * block_bytes + row / (Down * kTileRows) * lines * kTileBytes;

  zero_sums<Down, Across>(tiles);
  std::size_t group = 0;
  for (; group + kTileGroups <= args.groups; group += kTileGroups) {
    for (std::size_t line = 0; line < lines; ++line) {
      tiles.prefetch(ahead + (group * Across + line) * kTileBytes);
    }
    multiply_step<Down, Across>(tiles, left + group * kGemmDepthPerGroup, depth, kTileRows * depth,
                                right + group * kGemmBytesPerGroup, block_bytes);
  }
  if (const std::size_t rest = args.groups - group; rest > 0) {
    DepthEnd end = {};
    for (std::size_t m = 0; m < num_rows; ++m) {
      std::memcpy(end.left[m / kTileRows][m % kTileRows], left + m * depth + group * kGemmDepthPerGroup,
                  rest * kGemmDepthPerGroup);
    }
    for (std::size_t b = 0; b < Across; ++b) {
      std::memcpy(end.right[b], right + b * block_bytes + group * kGemmBytesPerGroup,
                  rest * kGemmBytesPerGroup);
    }
    // Compilers do not know that loads of tiles read memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    multiply_step<Down, Across>(tiles, end.left[0][0], kTileBytes, sizeof(end.left[0]), end.right[0][0],
                                sizeof(end.right[0]));
  }

  store_sums<Down, Across>(tiles, &sums[0][0], kTilesAcross * kGemmColumnsPerBlock);
}

// Computes `num_rows` rows from `row` on, which fit in Down tiles, for Across blocks.
template <std::size_t Down, std::size_t Across, typename Tiles, typename Store>
void multiply_rows(Tiles& tiles, const GemmArgs& args, std::size_t row, std::size_t num_rows,
                   std::size_t block, const Store& store) {
  alignas(kTileBytes) TileSums sums;
  multiply_tiles<Down, Across>(tiles, args, row, num_rows, block, sums);
  for (std::size_t m = 0; m < num_rows; ++m) {
    for (std::size_t b = 0; b < Across; ++b) {
      store(args, row + m, block + b, &sums[m][b * kGemmColumnsPerBlock]);
    }
  }
}

// Computes Across blocks for rows [row, end), which are complete tiles or fewer rows than one tile, as
// configured.
template <std::size_t Across, typename Tiles, typename Store>
void multiply_panel(Tiles& tiles, const GemmArgs& args, std::size_t row, std::size_t end, std::size_t block,
                    const Store& store) {
  constexpr std::size_t kPieceRows = kTilesDown * kTileRows;
  for (; row + kPieceRows <= end; row += kPieceRows) {
    multiply_rows<kTilesDown, Across>(tiles, args, row, kPieceRows, block, store);
  }
  if (row < end) multiply_rows<1, Across>(tiles, args, row, end - row, block, store);
}

// Computes the blocks [block_begin, block_end) for rows [row, end), which are complete tiles or fewer rows
// than one tile.
template <typename Tiles, typename Store>
void multiply_blocks(Tiles& tiles, const GemmArgs& args, std::size_t row, std::size_t end,
                     std::size_t block_begin, std::size_t block_end, const Store& store) {
  tiles.configure(end - row < kTileRows ? end - row : kTileRows);
  std::size_t block = block_begin;
  for (; block + kTilesAcross <= block_end; block += kTilesAcross) {
    multiply_panel<kTilesAcross>(tiles, args, row, end, block, store);
  }
  if (block < block_end) multiply_panel<1>(tiles, args, row, end, block, store);
}

// Returns the arguments for the rows from `row` on.
GemmArgs rows_from(GemmArgs args, std::size_t row) {
  args.rows -= row;
  args.left += row * args.groups * kGemmDepthPerGroup;
  args.left_scales += row;
  args.left_sums += row;
  args.out += row * args.out_stride;
  if (args.residual != nullptr) args.residual += row * args.residual_stride;
  return args;
}

// Computes the blocks [block_begin, block_end) of all rows: first all tiles with 16 rows, then the last rows.
// `few_rows` computes them if the rows are few.
template <typename Tiles, typename Store>
void multiply_by_tiles(const GemmArgs& args, std::size_t block_begin, std::size_t block_end,
                       const Store& store, GemmFunction* few_rows) {
  const std::size_t last = args.rows % kTileRows, whole = args.rows - last;
  if (whole > 0 || last >= kFewestRows) {
    Tiles tiles;
    if (whole > 0) multiply_blocks(tiles, args, 0, whole, block_begin, block_end, store);
    if (last >= kFewestRows) multiply_blocks(tiles, args, whole, args.rows, block_begin, block_end, store);
  }
  if (last > 0 && last < kFewestRows) few_rows(rows_from(args, whole), block_begin, block_end);
}

}  // namespace
}  // namespace chunkrt
