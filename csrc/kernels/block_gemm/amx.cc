// block_gemm with AMX: TDPBSSD multiplies 16 rows by 16 columns over a block of 32 values along k, with exact
// sums; AVX-512 scales the sums in the order of block_gemm.h. If the call has few rows, VNNI computes them,
// with identical results.
#include "kernels/block_gemm/tiles.h"
#include "kernels/list.h"
#include "kernels/store_avx512.h"
#include "kernels/tiles_amx.h"

namespace chunkrt {
namespace {

class Values {
 public:
  Values() {
#pragma GCC unroll 16
    for (std::size_t m = 0; m < kTileRows; ++m) of_[m] = _mm512_setzero_ps();
  }

  static void unpack(const std::uint8_t* packed, std::int8_t* out) {
    const __m512i low_half = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (std::size_t line = 0; line < kBlockBytes / kLineBytes; ++line) {
      const __m512i bytes = _mm512_loadu_si512(packed + line * kLineBytes);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half);
      _mm512_store_si512(out + 2 * line * kLineBytes, _mm512_and_si512(bytes, low_half));
      _mm512_store_si512(out + (2 * line + 1) * kLineBytes, high);
    }
  }

  static void widen_scales(const std::uint16_t* scales, float* out) {
    _mm512_store_ps(out, widen(scales));
    _mm512_store_ps(out + kBlockColumns, widen(scales + kBlockColumns));
  }

  static void widen_sums(const std::int32_t* sums, std::size_t stride, std::size_t num_rows, float* out) {
    const __m512i rows = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(rows, _mm512_set1_epi32(static_cast<std::int32_t>(stride)));
    const __m512i gathered =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(num_rows), places, sums, 4);
    _mm512_store_ps(out, _mm512_cvtepi32_ps(gathered));
  }

  void add(const std::int32_t* sums, const float* left_sums, const float* scales) {
    const __m512 scale = _mm512_load_ps(scales), minimum = _mm512_load_ps(scales + kBlockColumns);
#pragma GCC unroll 16
    for (std::size_t m = 0; m < kTileRows; ++m) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + m * kBlockColumns));
      of_[m] = _mm512_fmadd_ps(sum, scale, of_[m]);
      of_[m] = _mm512_fmadd_ps(_mm512_set1_ps(left_sums[m]), minimum, of_[m]);
    }
  }

  void store(const BlockGemmArgs& args, std::size_t row, std::size_t num_rows, std::size_t block) const {
    // A copy, because registers cannot be indexed.
    alignas(kLineBytes) float rows[kTileRows][kBlockColumns];
#pragma GCC unroll 16
    for (std::size_t m = 0; m < kTileRows; ++m) _mm512_store_ps(rows[m], of_[m]);
    for (std::size_t m = 0; m < num_rows; ++m) {
      store_columns(args, row + m, block * kBlockColumns, _mm512_load_ps(rows[m]), nullptr);
    }
  }

 private:
  __m512 of_[kTileRows];
};

}  // namespace

void block_gemm_f32_s8row_u4block_amx(const BlockGemmArgs& args, std::size_t block_begin,
                                      std::size_t block_end) {
  multiply_by_tiles<AmxTiles, Values>(args, block_begin, block_end, block_gemm_f32_s8row_u4block_avx512vnni);
}

}  // namespace chunkrt
