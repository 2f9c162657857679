// gemm with AVX-VNNI: the 256-bit vpdpbusd of processors without AVX-512.
//
// vpdpbusd multiplies unsigned by signed bytes, four values along k at a time, without saturation. The
// weights become the unsigned operand (w + 128, a flip of the top bit), so mapped weights need no
// preparation. Each sum starts at -128 * sum_k left[m, k], which cancels this offset. Intermediate sums wrap
// modulo 2^32, but the result is exact.
#include <immintrin.h>

#include <cstring>

#include "kernels/gemm/gemm.h"
#include "kernels/store_avx2.h"

namespace chunkrt {
namespace {

// With 6 rows the sums of a block's 16 columns fill 12 of the 16 registers; its two registers of weights, an
// activation and the flip take the rest.
constexpr std::size_t kTileRows = 6;
constexpr std::size_t kVectorColumns = 8;
constexpr std::size_t kVectors = kGemmColumnsPerBlock / kVectorColumns;

struct Sums {
  __m256i of[kTileRows][kVectors];
};

// Computes the sums over k of a tile. All loops except the one over k are unrolled, so that the sums stay in
// registers; if this function were inlined, the compiler would spill some of them.
template <std::size_t Rows>
[[gnu::noinline]] void accumulate(const GemmArgs& args, std::size_t row, std::size_t block, Sums& out) {
  const std::size_t depth = args.groups * kGemmDepthPerGroup;
  const std::size_t block_bytes = args.groups * kGemmBytesPerGroup;
  const std::int8_t* left = args.left + row * depth;
  const std::int8_t* right = args.right + block * block_bytes;
  const std::int8_t* right_end = right + block_bytes;
  const __m256i flip = _mm256_set1_epi8(-128);

  __m256i sums[Rows][kVectors];
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) sums[m][v] = _mm256_set1_epi32(-128 * args.left_sums[row + m]);
  }
  for (; right != right_end; right += kGemmBytesPerGroup, left += kGemmDepthPerGroup) {
    __m256i weights[kVectors];
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) {
      weights[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right) + v);
      weights[v] = _mm256_xor_si256(weights[v], flip);
    }
#pragma GCC unroll 6
    for (std::size_t m = 0; m < Rows; ++m) {
      std::int32_t quad;
      std::memcpy(&quad, left + m * depth, sizeof(quad));
      const __m256i activations = _mm256_set1_epi32(quad);
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        sums[m][v] = _mm256_dpbusd_avx_epi32(sums[m][v], weights[v], activations);
      }
    }
  }
#pragma GCC unroll 6
  for (std::size_t m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (std::size_t v = 0; v < kVectors; ++v) out.of[m][v] = sums[m][v];
  }
}

template <std::size_t Rows>
void compute_tile(const GemmArgs& args, std::size_t row, std::size_t block) {
  Sums sums;
  accumulate<Rows>(args, row, block, sums);
  for (std::size_t m = 0; m < Rows; ++m) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      store_columns(args, row + m, block * kGemmColumnsPerBlock + v * kVectorColumns,
                    _mm256_cvtepi32_ps(sums.of[m][v]), args.right_scales);
    }
  }
}

}  // namespace

void gemm_f32_s8row_s8col_avxvnni(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  constexpr void (*kComputeTile[])(const GemmArgs&, std::size_t, std::size_t) = {
      compute_tile<1>, compute_tile<2>, compute_tile<3>, compute_tile<4>, compute_tile<5>, compute_tile<6>};
  for (std::size_t block = block_begin; block < block_end; ++block) {
    for (std::size_t row = 0; row < args.rows; row += kTileRows) {
      const std::size_t left = args.rows - row;
      kComputeTile[(left < kTileRows ? left : kTileRows) - 1](args, row, block);
    }
  }
}

}  // namespace chunkrt
