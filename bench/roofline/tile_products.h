// The loops of tiles that every table of their peaks repeats. Everything in here is local to its file, so
// that no function is compiled under two sets of flags.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt::roofline {
namespace {

// Four independent sums, as in the kernels.
template <typename Tiles>
void products(std::size_t rounds) {
  Tiles tiles;
  tiles.configure(16);
  for (std::size_t round = 0; round < rounds; ++round) {
    tiles.template multiply<0, 6, 4>();
    tiles.template multiply<1, 6, 5>();
    tiles.template multiply<2, 7, 4>();
    tiles.template multiply<3, 7, 5>();
  }
}

// The same with loading each tile operand first, from the first-level cache.
template <typename Tiles>
void products_from_memory(std::size_t rounds) {
  alignas(64) static const std::int8_t operands[4][16][64] = {};
  Tiles tiles;
  tiles.configure(16);
  for (std::size_t round = 0; round < rounds; ++round) {
    tiles.template load<6>(operands[0][0], 64);
    tiles.template load<4>(operands[1][0], 64);
    tiles.template multiply<0, 6, 4>();
    tiles.template load<5>(operands[2][0], 64);
    tiles.template multiply<1, 6, 5>();
    tiles.template load<7>(operands[3][0], 64);
    tiles.template multiply<2, 7, 4>();
    tiles.template multiply<3, 7, 5>();
  }
}

}  // namespace
}  // namespace chunkrt::roofline
