// Activations in the form of linears with int8 rows. Each is computed once for a value and shared by all
// linears that read it.
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
// values arranged for gemm, int8 [rows, row_bytes], if its implementation reads them so.
struct Digit {
  ValueId values;
  ValueId scales;
  ValueId sums;
  std::optional<ValueId> arranged = {};

  std::vector<ValueId> uses() const;
};

// The outliers of a value's rows, and the rest: see kernels/outliers/outliers.h.
struct Outliers {
  ValueId rest;
  ValueId counts;
  ValueId channels;
  ValueId values;
  std::size_t capacity;
  RowOutliers in(const Frame& frame) const;
};

// Columns of an int8 row in the gemm kernel's layout.
inline std::size_t padded_depth(std::size_t depth) { return round_up(depth, kGemmDepthPerGroup); }

// Temporaries for values of that shape: [rows, width], or with more axes before the last.
Digit digit_for(ProgramBuilder& builder, Shape shape);
Outliers outliers_for(ProgramBuilder& builder, Shape shape);

const Outliers& outliers_of(ProgramBuilder& builder, ValueId input);
// The int8 rows of a value, the highest digit first; on the grid of a step if one is given.
const std::vector<Digit>& digits_of(ProgramBuilder& builder, ValueId input, std::size_t num_digits,
                                    std::optional<float> step);

// The row arrangement of that implementation of gemm or block_gemm, if it has one.
std::optional<RowArrangement> row_arrangement(const KernelRow<GemmFunction>& kernel);
std::optional<RowArrangement> row_arrangement(const KernelRow<BlockGemmFunction>& kernel);
// Digits with their rows arranged so.
std::vector<Digit> arranged_digits(const std::optional<RowArrangement>& arrangement, ProgramBuilder& builder,
                                   Symbol rows, std::vector<Digit> digits);

void require_step(float step, const std::string& what);
// The bias and residual of the named linear for its result [rows, columns].
void require_addends(const ProgramBuilder& builder, std::optional<ValueId> bias,
                     std::optional<ValueId> residual, Symbol rows, std::size_t columns,
                     const std::string& linear);

}  // namespace chunkrt
