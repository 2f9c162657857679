// The peak of AMX: int8 products of tiles.
#include "kernels/tiles_amx.h"
#include "peaks.h"
#include "tile_products.h"

namespace chunkrt::roofline {
namespace {

constexpr double kWork = 4 * 16 * 16 * 64;
constexpr Peak kPeaks[] = {
    {"int8", "tdpbssd", "4 sums, registers", kWork, products<AmxTiles>},
    {"int8", "tdpbssd", "4 sums, memory", kWork, products_from_memory<AmxTiles>},
};

}  // namespace

const PeakTable kPeaksAmx = {"amx", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
