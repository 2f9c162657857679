// Compares quantize by row with its definition, which is evaluated with exact rational steps in double
// precision where possible.
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

struct Quantized {
  std::vector<std::int8_t> values;
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
};

Quantized quantize(QuantizeFunction* function, const std::vector<float>& input, std::size_t width) {
  const std::size_t rows = input.size() / width, padded_width = (width + 3) / 4 * 4;
  const GuardedBuffer<float> guarded_input(input);
  const GuardedBuffer<std::int8_t> values(std::vector<std::int8_t>(rows * padded_width, 99));
  const GuardedBuffer<float> scales(rows);
  const GuardedBuffer<std::int32_t> sums(rows);
  const QuantizeArgs args = {.input = guarded_input.data(),
                             .values = values.data(),
                             .scales = scales.data(),
                             .sums = sums.data(),
                             .width = width,
                             .padded_width = padded_width};
  for (std::size_t row = rows; row-- > 0;) function(args, row, row + 1);
  return {values.copy(), scales.copy(), sums.copy()};
}

void check_row(const Quantized& found, const std::vector<float>& input, std::size_t width, std::size_t row) {
  const std::string where = "width " + std::to_string(width) + ", row " + std::to_string(row);
  const std::size_t padded_width = (width + 3) / 4 * 4;
  const float* x = input.data() + row * width;
  float largest = 0.0f;
  for (std::size_t i = 0; i < width; ++i) largest = std::fmax(largest, std::fabs(x[i]));
  const bool is_zero = largest < 0x1p-120f;
  const float inverse = is_zero ? 0.0f : 127.0f / largest;
  std::int32_t sum = 0;
  for (std::size_t i = 0; i < padded_width; ++i) {
    // The product of two floats is exact in double, so this rounds to float once, and then to an integer.
    const double product = i < width ? static_cast<double>(x[i]) * static_cast<double>(inverse) : 0.0;
    const double expected = std::nearbyint(static_cast<double>(static_cast<float>(product)));
    const int value = found.values[row * padded_width + i];
    check(value == static_cast<int>(expected), [&] {
      return where + ", column " + std::to_string(i) + " is " + std::to_string(value) + ", expected " +
             std::to_string(expected);
    });
    check(value >= -127, [&] { return where + " holds -128"; });
    sum += value;
  }
  check(found.sums[row] == sum, [&] { return where + " has a wrong sum"; });
  const float scale = is_zero ? 0.0f : largest / 127.0f;
  check_same(&found.scales[row], &scale, 1, where + ", the scale");
}

void test_widths(QuantizeFunction* function) {
  constexpr std::size_t kRows = 3;
  for (std::size_t width = 1; width <= 577; width += width == 70 ? 506 : 1) {  // and 576 and 577
    const std::vector<float> input = Random(static_cast<std::uint32_t>(width)).floats(kRows * width, 3.0f);
    const Quantized found = quantize(function, input, width);
    for (std::size_t row = 0; row < kRows; ++row) check_row(found, input, width, row);
  }
}

// With 127 as the largest magnitude the input is its own quantised value, and halves round to even.
void test_ties(QuantizeFunction* function) {
  std::vector<float> input = {127.0f};
  for (int i = -127; i < 127; ++i) input.push_back(static_cast<float>(i) + 0.5f);
  const Quantized found = quantize(function, input, input.size());
  check_row(found, input, input.size(), 0);
  check(found.values[1] == -126 && found.values[128] == 0 && found.values[129] == 2,
        "a half is not rounded to even");
}

void test_magnitudes(QuantizeFunction* function) {
  for (const std::size_t width : {2u, 11u, 16u, 33u, 577u}) {
    for (const float limit : {0.0f, 0x1p-149f, 0x1p-126f, 0x1.fffffep-121f, 0x1p-120f, 1e-30f, 1e-3f, 1e30f,
                              std::numeric_limits<float>::max()}) {
      std::vector<float> input = Random(7).floats(width, limit);
      input[width - 1] = -limit;
      check_row(quantize(function, input, width), input, width, 0);
    }
  }
}

void test_not_finite(QuantizeFunction* function) {
  for (const std::size_t width : {1u, 7u, 8u, 33u}) {
    for (std::size_t place = 0; place < width; ++place) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        std::vector<float> input = Random(8).floats(2 * width, 1.0f);
        input[place] = bad;
        const Quantized found = quantize(function, input, width);
        check(std::isnan(found.scales[0]), "the scale of a row that is not finite is finite");
        check(found.sums[0] == 0, "the sum of a row that is not finite is not 0");
        for (std::size_t i = 0; i < (width + 3) / 4 * 4; ++i) {
          check(found.values[i] == 0, "a value of a row that is not finite is not 0");
        }
        check_row(found, input, width, 1);
      }
    }
  }
}

}  // namespace

void test_quantize(Suite& suite) {
  const auto run = [&](const char* name, void (*test)(QuantizeFunction*)) {
    suite.run_rows(quantize_s8row_f32, name, test);
  };
  run("its definition at every width", test_widths);
  run("halves round to even", test_ties);
  run("from nothing to the largest float", test_magnitudes);
  run("rows that are not finite", test_not_finite);
}

}  // namespace chunkrt::testing
