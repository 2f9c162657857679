// Activations in the form that linears with int8 rows read. Each form is computed once for a value and shared
// by all linears that read this value.
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

// One digit of all rows: values int8 [rows, padded_depth], scales float32 [rows] and sums int32 [rows]. If
// the implementation of gemm reads arranged rows, it also contains these, int8 [rows, row_bytes].
struct Digit {
  ValueId values;
  ValueId scales;
  ValueId sums;
  std::optional<ValueId> arranged = {};

  std::vector<ValueId> uses() const;
};

// The outliers of a value's rows, and the rows without them: see kernels/outliers/outliers.h.
struct Outliers {
  ValueId rest;
  ValueId counts;
  ValueId channels;
  ValueId values;
  std::size_t capacity;
  RowOutliers in(const Frame& frame) const;
};

// Returns the number of columns of an int8 row in the gemm kernel's layout.
inline std::size_t padded_depth(std::size_t depth) { return round_up(depth, kGemmDepthPerGroup); }

// Temporaries for values of that shape: [rows, width], or with more axes before the last.
Digit digit_for(ProgramBuilder& builder, Shape shape);
Outliers outliers_for(ProgramBuilder& builder, Shape shape);

const Outliers& outliers_of(ProgramBuilder& builder, ValueId input);
// Returns the int8 rows of a value, the highest digit first. If a step is given, the rows are on its grid.
const std::vector<Digit>& digits_of(ProgramBuilder& builder, ValueId input, std::size_t num_digits,
                                    std::optional<float> step);

// Returns the row arrangement of that implementation of gemm or block_gemm, if it has one.
std::optional<RowArrangement> row_arrangement(const KernelRow<GemmFunction>& kernel);
std::optional<RowArrangement> row_arrangement(const KernelRow<BlockGemmFunction>& kernel);
// Returns digits with their rows in that arrangement.
std::vector<Digit> arranged_digits(const std::optional<RowArrangement>& arrangement, ProgramBuilder& builder,
                                   Symbol rows, std::vector<Digit> digits);

void require_step(float step, const std::string& what);
// Returns the bias and residual of the named linear for its result [rows, columns].
void require_addends(const ProgramBuilder& builder, std::optional<ValueId> bias,
                     std::optional<ValueId> residual, Symbol rows, std::size_t columns,
                     const std::string& linear);

}  // namespace chunkrt
