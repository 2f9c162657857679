// What gemm's two ways with AVX2 have in common; nothing here is seen outside of avx2.cc.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/store_avx2.h"

namespace chunkrt {
namespace {

// A panel keeps the sums of so many blocks, over one depth chunk after the other, so that what is made of
// activations needs room for one chunk only, which stays in the first-level cache.
constexpr std::size_t kPanelBlocks = 6;
constexpr std::size_t kChunkGroups = 256;
constexpr std::size_t kChunkDepth = kChunkGroups * kGemmDepthPerGroup;

std::size_t smaller(std::size_t left, std::size_t right) { return left < right ? left : right; }

}  // namespace
}  // namespace chunkrt
