// Common parts of the two AVX2 methods of gemm; nothing here is visible outside of avx2.cc.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/store_avx2.h"

namespace chunkrt {
namespace {

// Number of blocks of a panel. The panel keeps the sums of its blocks over consecutive depth chunks, so that
// converted activations need room for only one chunk, which stays in the first-level cache.
constexpr std::size_t kPanelBlocks = 6;
constexpr std::size_t kChunkGroups = 256;
constexpr std::size_t kChunkDepth = kChunkGroups * kGemmDepthPerGroup;

std::size_t smaller(std::size_t left, std::size_t right) { return left < right ? left : right; }

}  // namespace
}  // namespace chunkrt
