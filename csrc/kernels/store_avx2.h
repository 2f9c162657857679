// The epilogue of a product (scales, bias, residual), for the files that are compiled with AVX2; nothing here
// is visible outside of them.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace chunkrt {
namespace {

// The first `count` of eight lanes, or all lanes. A complete vector is stored without a mask, because a
// masked store takes about twenty cycles on AMD's processors.
class Lanes {
 public:
  explicit Lanes(std::size_t count) : are_all_(count >= 8), count_(count) {}

  // Loads the lanes; the other lanes are zeros.
  __m256 load(const float* from) const {
    return are_all_ ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, mask());
  }

  void store(float* to, __m256 value) const {
    if (are_all_) {
      _mm256_storeu_ps(to, value);
    } else {
      _mm256_maskstore_ps(to, mask(), value);
    }
  }

 private:
  __m256i mask() const {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count_)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  bool are_all_;
  std::size_t count_;
};

// Stores eight adjacent columns of one row: (value * left_scales) * scales + bias + residual, with a rounding
// after each operation. Missing scales, bias or residual are omitted. Columns past N are not written.
template <typename Args>
[[gnu::always_inline]] inline void store_columns(const Args& args, std::size_t row, std::size_t column,
                                                 __m256 value, const float* scales) {
  if (column >= args.columns) return;
  const Lanes lanes(args.columns - column);
  value = _mm256_mul_ps(value, _mm256_set1_ps(args.left_scales[row]));
  if (scales != nullptr) value = _mm256_mul_ps(value, lanes.load(scales + column));
  if (args.bias != nullptr) value = _mm256_add_ps(value, lanes.load(args.bias + column));
  if (args.residual != nullptr) {
    value = _mm256_add_ps(value, lanes.load(args.residual + row * args.residual_stride + column));
  }
  lanes.store(args.out + row * args.out_stride + column, value);
}

}  // namespace
}  // namespace chunkrt
