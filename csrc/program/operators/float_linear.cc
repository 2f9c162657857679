// float_linear: the product for linears that no scheme quantises.
#include "kernels/dispatch.h"
#include "program/operators/operators.h"
#include "program/sizes.h"

namespace chunkrt {

ValueId float_linear(ProgramBuilder& builder, ValueId input, ValueId weight) {
  const Symbol symbol = builder.rows_of(input, "float_linear's input");
  const std::size_t depth = builder.width_of(input);
  require(builder.value(weight).shape.size() == 2,
          "float_linear: expected a weight float32 [K, N], got " +
              describe(builder.value(weight).dtype, builder.value(weight).shape));
  const std::size_t columns = builder.width_of(weight);
  builder.require_constant(weight, Dtype::float32, {fixed(depth), fixed(columns)}, "float_linear's weight");
  const ValueId out = builder.float_rows(symbol, columns);
  FloatLinearFunction* kernel = select_kernel(float_linear_f32_f32).function;
  const std::size_t items = ceil_divide(columns, kFloatLinearColumns);
  builder.add_loop([items](const Frame&) { return items; }, 1, "float_linear", {input, weight, out},
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                     kernel({.left = frame.get<const float>(input),
                             .weight = frame.get<const float>(weight),
                             .out = frame.get<float>(out),
                             .rows = frame.size_of(symbol),
                             .depth = depth,
                             .columns = columns},
                            begin, end);
                   });
  return out;
}

}  // namespace chunkrt
