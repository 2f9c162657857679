// gemm with AMX: TDPBSSD multiplies 16 rows by 16 columns, 64 k deep, signed by signed, and adds up exactly.
// A few rows are left to VNNI: the same bits.
#include "kernels/gemm/tiles.h"
#include "kernels/list.h"
#include "kernels/store_avx512.h"
#include "kernels/tiles_amx.h"

namespace chunkrt {
namespace {

// What follows the products takes as long as a third of them: what all rows share is loaded once, and what
// there is not costs nothing.
template <bool HasBias, bool HasResidual>
void store_rows(const GemmArgs& args, std::size_t row, std::size_t num_rows, std::size_t column,
                const std::int32_t* sums) {
  const __m512 scales = _mm512_loadu_ps(args.right_scales + column);
  const __m512 bias = HasBias ? _mm512_loadu_ps(args.bias + column) : _mm512_setzero_ps();
  const float* left_scales = args.left_scales + row;
  const float* residual = HasResidual ? args.residual + row * args.residual_stride + column : nullptr;
  float* out = args.out + row * args.out_stride + column;
  for (std::size_t m = 0; m < num_rows; ++m, sums += kSumsStride, out += args.out_stride) {
    __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums)), _mm512_set1_ps(left_scales[m]));
    value = _mm512_mul_ps(value, scales);
    if constexpr (HasBias) value = _mm512_add_ps(value, bias);
    if constexpr (HasResidual) {
      value = _mm512_add_ps(value, _mm512_loadu_ps(residual));
      residual += args.residual_stride;
    }
    _mm512_storeu_ps(out, value);
  }
}

void store_block(const GemmArgs& args, std::size_t row, std::size_t num_rows, std::size_t block,
                 const std::int32_t* sums) {
  const std::size_t column = block * kGemmColumnsPerBlock;
  if (column + kGemmColumnsPerBlock > args.columns) {
    for (std::size_t m = 0; m < num_rows; ++m) {
      const __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(sums + m * kSumsStride));
      store_columns(args, row + m, column, value, args.right_scales);
    }
  } else if (args.bias != nullptr) {
    const auto store = args.residual != nullptr ? store_rows<true, true> : store_rows<true, false>;
    store(args, row, num_rows, column, sums);
  } else {
    const auto store = args.residual != nullptr ? store_rows<false, true> : store_rows<false, false>;
    store(args, row, num_rows, column, sums);
  }
}

}  // namespace

void gemm_f32_s8row_s8col_amx(const GemmArgs& args, std::size_t block_begin, std::size_t block_end) {
  multiply_by_tiles<AmxTiles>(args, block_begin, block_end, store_block, gemm_f32_s8row_s8col_avx512vnni);
}

}  // namespace chunkrt
