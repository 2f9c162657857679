// The peak of AMX: int8 products of tiles.
#include <immintrin.h>

#include "kernels/tiles_amx.h"
#include "peaks.h"

namespace chunkrt::roofline {
namespace {

// Four sums that do not wait for each other, as the kernel has them.
void products(std::size_t rounds) {
  AmxTiles tiles;
  tiles.configure(16);
  for (std::size_t round = 0; round < rounds; ++round) {
    tiles.multiply<0, 6, 4>();
    tiles.multiply<1, 6, 5>();
    tiles.multiply<2, 7, 4>();
    tiles.multiply<3, 7, 5>();
  }
}

// The same with each tile that is multiplied loaded first, from the first-level cache.
void products_from_memory(std::size_t rounds) {
  alignas(64) static const std::int8_t operands[4][16][64] = {};
  AmxTiles tiles;
  tiles.configure(16);
  for (std::size_t round = 0; round < rounds; ++round) {
    tiles.load<6>(operands[0][0], 64);
    tiles.load<4>(operands[1][0], 64);
    tiles.multiply<0, 6, 4>();
    tiles.load<5>(operands[2][0], 64);
    tiles.multiply<1, 6, 5>();
    tiles.load<7>(operands[3][0], 64);
    tiles.multiply<2, 7, 4>();
    tiles.multiply<3, 7, 5>();
  }
}

constexpr double kWork = 4 * 16 * 16 * 64;
constexpr Peak kPeaks[] = {
    {"int8", "tdpbssd", "4 sums, registers", kWork, products},
    {"int8", "tdpbssd", "4 sums, memory", kWork, products_from_memory},
};

}  // namespace

const PeakTable kPeaksAmx = {"amx", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
