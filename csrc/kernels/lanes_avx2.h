// Loads and stores of a vector's first lanes, for the files that are compiled with AVX2; nothing here is
// visible outside of these files.
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

}  // namespace
}  // namespace chunkrt
