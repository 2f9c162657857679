// The common part of products with matrix tiles: two by two tiles of sums (0 to 3), two right tiles (4 and 5)
// and two left tiles (6 and 7), so that each loaded tile is used twice. Down is the number of left tiles in
// use, and Across is the number of right tiles in use. tiles.h in kernels/{gemm,attention} describes the
// operations.
//
// One file for each instruction set includes this header; nothing here is visible outside of that file.
#pragma once

#include <cstddef>

namespace chunkrt {
namespace {

constexpr std::size_t kTileRows = 16;   // and columns of sums
constexpr std::size_t kTileBytes = 64;  // bytes of a row
constexpr std::size_t kTilesDown = 2;
constexpr std::size_t kTilesAcross = 2;
constexpr std::size_t kRightTile = kTilesDown * kTilesAcross;
constexpr std::size_t kLeftTile = kRightTile + kTilesAcross;

// Calls use<number>(row, column) for each tile of sums, with the position of its first element.
template <std::size_t Down, std::size_t Across, typename Use>
void for_each_sum(const Use& use) {
  use.template operator()<0>(0, 0);
  if constexpr (Across == 2) use.template operator()<1>(0, kTileRows);
  if constexpr (Down == 2) use.template operator()<kTilesAcross>(kTileRows, 0);
  if constexpr (Down == 2 && Across == 2) use.template operator()<kTilesAcross + 1>(kTileRows, kTileRows);
}

template <std::size_t Down, std::size_t Across, typename Tiles>
void zero_sums(Tiles& tiles) {
  for_each_sum<Down, Across>([&]<std::size_t Sum>(std::size_t, std::size_t) { tiles.template zero<Sum>(); });
}

// The sums are stored in rows of `width` elements.
template <std::size_t Down, std::size_t Across, typename Tiles, typename Element>
void load_sums(Tiles& tiles, const Element* sums, std::size_t width) {
  for_each_sum<Down, Across>([&]<std::size_t Sum>(std::size_t row, std::size_t column) {
    tiles.template load_sums<Sum>(sums + row * width + column, width * sizeof(Element));
  });
}

template <std::size_t Down, std::size_t Across, typename Tiles, typename Element>
void store_sums(Tiles& tiles, Element* sums, std::size_t width) {
  for_each_sum<Down, Across>([&]<std::size_t Sum>(std::size_t row, std::size_t column) {
    tiles.template store<Sum>(sums + row * width + column, width * sizeof(Element));
  });
}

// Computes one step of depth: the products of the tiles at `left` and `left + left_distance`, whose rows are
// `stride` bytes apart, and the tiles at `right` and `right + right_distance`, whose rows are contiguous.
// Distances are in elements.
template <std::size_t Down, std::size_t Across, typename Tiles, typename Element>
void multiply_step(Tiles& tiles, const Element* left, std::size_t stride, std::size_t left_distance,
                   const Element* right, std::size_t right_distance) {
  tiles.template load<kLeftTile>(left, stride);
  tiles.template load<kRightTile>(right, kTileBytes);
  tiles.template multiply<0, kLeftTile, kRightTile>();
  if constexpr (Across == 2) {
    tiles.template load<kRightTile + 1>(right + right_distance, kTileBytes);
    tiles.template multiply<1, kLeftTile, kRightTile + 1>();
  }
  if constexpr (Down == 2) {
    tiles.template load<kLeftTile + 1>(left + left_distance, stride);
    tiles.template multiply<kTilesAcross, kLeftTile + 1, kRightTile>();
    if constexpr (Across == 2) tiles.template multiply<kTilesAcross + 1, kLeftTile + 1, kRightTile + 1>();
  }
}

}  // namespace
}  // namespace chunkrt
