// Sums of products in registers, for instruction sets that broadcast a factor from memory.
#pragma once

namespace chunkrt {
namespace {

// sums[m][v] = the chain multiply_add(factors[m][i], vectors[i][v], sums[m][v]) over i from 0 to count - 1.
// The strides are the distances between rows of factors and between rows of vectors; load_vector(from, v)
// loads the vector v of a row.
template <std::size_t M, std::size_t V, typename Load>
CHUNKRT_LANES void add_products(Floats (&sums)[M][V], const float* factors, std::size_t factor_stride,
                                const float* vectors, std::size_t vector_stride, std::size_t count,
                                Load load_vector) {
  for (std::size_t i = 0; i < count; ++i, vectors += vector_stride) {
    Floats of_row[V];
#pragma GCC unroll 2
    for (std::size_t v = 0; v < V; ++v) of_row[v] = load_vector(vectors + v * 16, v);
#pragma GCC unroll 6
    for (std::size_t m = 0; m < M; ++m) {
      const Floats factor = all(factors[m * factor_stride + i]);
#pragma GCC unroll 2
      for (std::size_t v = 0; v < V; ++v) sums[m][v] = multiply_add(factor, of_row[v], sums[m][v]);
    }
  }
}

}  // namespace
}  // namespace chunkrt
