// Layouts of the rows of `left` that the implementation of gemm or block_gemm for one instruction set reads.
// Rows are arranged once and then read for all columns.
//
// AVX2, gemm: each row is split as described in parted.h.
//
// NEON with i8mm: two rows are interleaved: 8 values along k of the first row alternate with 8 values of the
// second, as smmla requires for its 2 x 2 tiles. The depth is padded with zeros to complete pairs. The
// partner of an odd last row is unspecified. For block_gemm, each 32 values along k are followed by their
// sums in float32, twice for the first row and twice for the second.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

// Arranges rows [row_begin, row_end) of `values`, int8 [rows, groups * 4], in `arranged`.
using ArrangeRowsFunction = void(const std::int8_t* values, std::size_t groups, std::size_t row_begin,
                                 std::size_t row_end, std::int8_t* arranged);

ArrangeRowsFunction part_rows_avx2, pair_rows_neon_i8mm, pair_block_rows_neon_i8mm;

struct RowArrangement {
  ArrangeRowsFunction* arrange;
  std::size_t (*row_bytes)(std::size_t groups);  // rows are contiguous
  std::size_t rows_together;                     // row_begin is a multiple of this number
};

constexpr std::size_t paired_row_bytes(std::size_t groups) { return (groups + 1) / 2 * 8; }
constexpr std::size_t paired_block_row_bytes(std::size_t groups) { return groups / 8 * 40; }

}  // namespace chunkrt
