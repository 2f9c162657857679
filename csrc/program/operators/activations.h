// Activations as the linears with int8 rows take them. Each is made once for a value, however many linears
// read it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/gemm/arranged.h"
#include "kernels/gemm/gemm.h"
#include "kernels/outliers/outliers.h"
#include "program/builder.h"
#include "program/sizes.h"

namespace chunkrt {

// One digit of all rows: values int8 [rows, padded_depth], scales float32 [rows], sums int32 [rows]; and the
// values arranged for gemm, int8 [rows, row_bytes], where its implementation reads them so.
struct Digit {
  ValueId values;
  ValueId scales;
  ValueId sums;
  std::optional<ValueId> arranged = {};

  std::vector<ValueId> uses() const;
};

// What is large in a value's rows, and the rest: see kernels/outliers/outliers.h.
struct Outliers {
  ValueId rest;
  ValueId counts;
  ValueId channels;
  ValueId values;
  std::size_t capacity;
  RowOutliers in(const Frame& frame) const;
};

// Columns of an int8 row as the gemm kernel reads it.
inline std::size_t padded_depth(std::size_t depth) { return round_up(depth, kGemmDepthPerGroup); }

// Temporaries for values of that shape: [rows, width], or with more axes before the last.
Digit digit_for(ProgramBuilder& builder, Shape shape);
Outliers outliers_for(ProgramBuilder& builder, Shape shape);

const Outliers& outliers_of(ProgramBuilder& builder, ValueId input);
// The int8 rows that stand for a value, the highest digit first; on the grid of a step if there is one.
const std::vector<Digit>& digits_of(ProgramBuilder& builder, ValueId input, std::size_t num_digits,
                                    std::optional<float> step);

// How that implementation of gemm or block_gemm wants its rows, if not as they are.
std::optional<RowArrangement> row_arrangement(const KernelRow<GemmFunction>& kernel);
std::optional<RowArrangement> row_arrangement(const KernelRow<BlockGemmFunction>& kernel);
// Digits with their rows arranged so.
std::vector<Digit> arranged_digits(const std::optional<RowArrangement>& arrangement, ProgramBuilder& builder,
                                   Symbol rows, std::vector<Digit> digits);

void require_step(float step, const std::string& what);
// What a linear of that name adds to its result [rows, columns].
void require_addends(const ProgramBuilder& builder, std::optional<ValueId> bias,
                     std::optional<ValueId> residual, Symbol rows, std::size_t columns,
                     const std::string& linear);

}  // namespace chunkrt
