// The peak of AMX in bfloat16: products of tiles.
#include "kernels/tiles_amx.h"
#include "peaks.h"
#include "tile_products.h"

namespace chunkrt::roofline {
namespace {

constexpr double kWork = 4 * 16 * 16 * 32;
constexpr Peak kPeaks[] = {
    {"bfloat16", "tdpbf16ps", "4 sums, registers", kWork, products<AmxBfloatTiles>},
    {"bfloat16", "tdpbf16ps", "4 sums, memory", kWork, products_from_memory<AmxBfloatTiles>},
};

}  // namespace

const PeakTable kPeaksAmxBf16 = {"amx_bf16", kPeaks, sizeof(kPeaks) / sizeof(Peak), nullptr};

}  // namespace chunkrt::roofline
