// Compares float_linear on every instruction set with the definition, bit for bit.
#include <cmath>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

void test_sizes(FloatLinearFunction* function) {
  for (const std::size_t rows : {1u, 3u, 4u, 5u, 9u}) {
    for (const std::size_t depth : {1u, 7u, 64u}) {
      for (const std::size_t columns : {1u, 15u, 16u, 17u, 40u}) {
        Random random(static_cast<std::uint32_t>(rows * 100 + depth + columns));
        const std::vector<float> left = random.floats(rows * depth, 1.0f);
        const std::vector<float> weight = random.floats(depth * columns, 1.0f);
        const GuardedBuffer<float> guarded_left(left), guarded_weight(weight), out(rows * columns);
        const FloatLinearArgs args = {.left = guarded_left.data(),
                                      .weight = guarded_weight.data(),
                                      .out = out.data(),
                                      .rows = rows,
                                      .depth = depth,
                                      .columns = columns};
        const std::size_t items = (columns + kFloatLinearColumns - 1) / kFloatLinearColumns;
        function(args, items / 2, items);
        function(args, 0, items / 2);
        for (std::size_t m = 0; m < rows; ++m) {
          for (std::size_t n = 0; n < columns; ++n) {
            float expected = 0.0f;
            for (std::size_t k = 0; k < depth; ++k) {
              expected = std::fma(left[m * depth + k], weight[k * columns + n], expected);
            }
            check_same(out.data() + m * columns + n, &expected, 1,
                       "row " + std::to_string(m) + ", column " + std::to_string(n));
          }
        }
      }
    }
  }
}

}  // namespace

void test_float_linear(Suite& suite) {
  suite.run_rows(float_linear_f32_f32, "its definition at every size", test_sizes);
}

}  // namespace chunkrt::testing
