// Compares quantize and round_to_grid, on the grid of a static scheme, with their definitions in double
// precision.
//
// A double has more than twice a float's digits, so rounding a quotient of two floats first to double and
// then to float gives the same result as rounding it once.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double rounded_quotient(float x, float step, double levels) {
  const float quotient = static_cast<float>(static_cast<double>(x) / static_cast<double>(step));
  return std::clamp(std::nearbyint(static_cast<double>(quotient)), -levels, levels);
}

struct Digit {
  std::vector<std::int8_t> values;
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
};

// The digits of every row, the lowest first.
std::vector<Digit> quantize(GridQuantizeFunction* function, const std::vector<float>& input,
                            std::size_t width, float step, std::size_t num_digits) {
  const std::size_t rows = input.size() / width, padded_width = (width + 3) / 4 * 4;
  const GuardedBuffer<float> guarded_input(input);
  const std::vector<std::int8_t> canaries(rows * padded_width, 99);
  const GuardedBuffer<std::int8_t> low(canaries), high(canaries);
  const GuardedBuffer<float> low_scales(rows), high_scales(rows);
  const GuardedBuffer<std::int32_t> low_sums(rows), high_sums(rows);
  GridQuantizeArgs args = {
      .input = guarded_input.data(),
      .step = step,
      .low = {.values = low.data(), .scales = low_scales.data(), .sums = low_sums.data()},
      .high = {},
      .width = width,
      .padded_width = padded_width};
  if (num_digits == 2) {
    args.high = {.values = high.data(), .scales = high_scales.data(), .sums = high_sums.data()};
  }
  for (std::size_t row = rows; row-- > 0;) function(args, row, row + 1);
  std::vector<Digit> digits = {{low.copy(), low_scales.copy(), low_sums.copy()}};
  if (num_digits == 2) digits.push_back({high.copy(), high_scales.copy(), high_sums.copy()});
  return digits;
}

void check_rows(GridQuantizeFunction* function, const std::vector<float>& input, std::size_t width,
                float step) {
  const std::size_t padded_width = (width + 3) / 4 * 4;
  for (const std::size_t num_digits : {1u, 2u}) {
    const std::vector<Digit> digits = quantize(function, input, width, step, num_digits);
    const double levels = num_digits == 2 ? 32639.0 : 127.0;
    for (std::size_t row = 0; row < input.size() / width; ++row) {
      const float* x = input.data() + row * width;
      const std::string where = std::to_string(num_digits) + " digits, width " + std::to_string(width) +
                                ", row " + std::to_string(row) + ", column ";
      std::vector<std::int32_t> sums(num_digits);
      for (std::size_t i = 0; i < padded_width; ++i) {
        int value = 0;
        for (std::size_t digit = num_digits; digit-- > 0;) {
          value = value * 256 + digits[digit].values[row * padded_width + i];
          sums[digit] += digits[digit].values[row * padded_width + i];
        }
        const bool is_zero = i >= width || std::isnan(x[i]);
        const int expected = is_zero ? 0 : static_cast<int>(rounded_quotient(x[i], step, levels));
        check(value == expected, [&] {
          return where + std::to_string(i) + " is " + std::to_string(value) + ", expected " +
                 std::to_string(expected);
        });
        check(digits.back().values[row * padded_width + i] >= -127,
              [&] { return where + std::to_string(i) + " holds -128"; });
      }
      const bool has_nan = std::any_of(x, x + width, [](float value) { return std::isnan(value); });
      for (std::size_t digit = 0; digit < num_digits; ++digit) {
        const float scale = has_nan ? kNan : digit == 0 ? 1.0f : 256.0f;
        check(same(digits[digit].scales[row], scale), [&] { return where + "any: a wrong scale"; });
        check(digits[digit].sums[row] == sums[digit], [&] { return where + "any: a wrong sum"; });
      }
    }
  }
}

void test_widths(GridQuantizeFunction* function) {
  constexpr std::size_t kRows = 3;
  for (std::size_t width = 1; width <= 577; width += width == 70 ? 506 : 1) {  // and 576 and 577
    const std::vector<float> input = Random(static_cast<std::uint32_t>(width)).floats(kRows * width, 3.0f);
    for (const float step : {0.03f, 3.0f / 127.0f, 3.0f / 32639.0f, 1e-5f}) {
      check_rows(function, input, width, step);
    }
  }
}

// Tests every integer and every half that a grid distinguishes, and some that it does not distinguish, as
// exact values and as quotients.
void test_every_level(GridQuantizeFunction* function) {
  for (const float step : {1.0f, 0.3f, 0x1p-126f}) {
    std::vector<float> input;
    for (int i = -65400; i <= 65400; ++i) input.push_back(static_cast<float>(i) * 0.5f * step);
    check_rows(function, input, input.size(), step);
  }
}

void test_extremes(GridQuantizeFunction* function) {
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const float step : {0x1p-149f, 0x1p-126f, 1e-30f, 1.0f, 1e30f, kMost}) {
    std::vector<float> input = {0.0f, 0x1p-149f, 0x1p-126f, 1e-30f, 0.5f,     1.0f,
                                1e9f, 3e9f,      1e30f,     kMost,  kInfinity};
    const std::size_t count = input.size();
    for (std::size_t i = 0; i < count; ++i) input.push_back(-input[i]);
    check_rows(function, input, input.size(), step);
  }
}

void test_not_a_number(GridQuantizeFunction* function) {
  for (const std::size_t width : {1u, 7u, 8u, 33u}) {
    for (std::size_t place = 0; place < width; ++place) {
      std::vector<float> input = Random(8).floats(2 * width, 1.0f);
      input[place] = kNan;
      check_rows(function, input, width, 0.01f);
    }
  }
}

// Tests values around a tie of 0.5 steps, where x * (1 / step) would round some values in the other
// direction.
void test_quotient_is_rounded(GridQuantizeFunction* function) {
  std::vector<float> steps = Random(3).floats(200, 1.0f), input;
  std::size_t num_different = 0;
  for (float& step : steps) {
    step = std::fabs(step) + 0.1f;
    input.clear();
    for (int i = 0; i < 127; ++i) {
      const float tie = (static_cast<float>(i) + 0.5f) * step;
      input.insert(input.end(), {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, kInfinity)});
    }
    for (const float x : input) {
      num_different += std::nearbyint(x / step) != std::nearbyint(x * (1.0f / step)) ? 1 : 0;
    }
    check_rows(function, input, input.size(), step);
  }
  check(num_different > 0, "the test cannot distinguish a quotient from a product");
}

void check_round(RoundToGridFunction* function, const std::vector<float>& input,
                 const std::vector<float>& steps, float levels) {
  const GuardedBuffer<float> guarded_input(input), guarded_steps(steps), out(input.size());
  function(guarded_input.data(), guarded_steps.data(), levels, out.data(), out.size());
  for (std::size_t i = 0; i < input.size(); ++i) {
    const double q = rounded_quotient(input[i], steps[i], static_cast<double>(levels));
    const float expected = static_cast<float>(q * static_cast<double>(steps[i]));
    check(same(out[i], expected), [&] {
      return "element " + std::to_string(i) + " of " + std::to_string(input.size()) + " is " +
             std::to_string(out[i]) + ", expected " + std::to_string(expected);
    });
  }
  const std::vector<float> result = out.copy();
  function(guarded_input.data(), guarded_steps.data(), levels, guarded_input.data(), out.size());
  check_same(guarded_input.data(), result.data(), result.size(), "in place");
}

void test_round_counts(RoundToGridFunction* function) {
  for (std::size_t count = 0; count <= 577; count += count == 70 ? 506 : 1) {  // and 576 and 577
    std::vector<float> steps = Random(1).floats(count, 0.1f);
    for (float& step : steps) step = std::fabs(step) + 1e-4f;
    for (const float levels : {127.0f, 32639.0f}) {
      check_round(function, Random(2).floats(count, 5.0f), steps, levels);
    }
  }
}

void test_round_special(RoundToGridFunction* function) {
  std::vector<float> input = {0.0f, 0x1p-149f, 0.25f,  0.5f, 1.0f,  1.5f,
                              2.5f, 126.5f,    127.5f, 3e9f, 1e38f, kInfinity};
  const std::size_t count = input.size();
  for (std::size_t i = 0; i < count; ++i) input.push_back(-input[i]);
  input.push_back(kNan);
  for (const float step : {0x1p-149f, 1e-30f, 0.3f, 1.0f, 1e30f}) {
    check_round(function, input, std::vector<float>(input.size(), step), 127.0f);
  }
}

}  // namespace

void test_grid(Suite& suite) {
  const auto quantize_with = [&](const char* name, void (*test)(GridQuantizeFunction*)) {
    suite.run_rows(quantize_s8grid_f32, name, test);
  };
  quantize_with("its definition at every width", test_widths);
  quantize_with("every level and every half", test_every_level);
  quantize_with("from nothing to infinity", test_extremes);
  quantize_with("rows that hold a NaN", test_not_a_number);
  quantize_with("a quotient, not a product", test_quotient_is_rounded);
  suite.run_rows(round_to_grid_f32_f32_f32, "its definition at any count", test_round_counts);
  suite.run_rows(round_to_grid_f32_f32_f32, "ties, infinities and NaN", test_round_special);
}

}  // namespace chunkrt::testing
