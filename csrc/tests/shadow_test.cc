// Compares the kernels for the shadow of a linear with their definitions in double precision.
//
// A double has more than twice a float's digits, so rounding a quotient, product or sum of two floats first
// to double and then to float gives the same result as rounding it once.
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
constexpr float kMost = std::numeric_limits<float>::max();

float difference(float left, float right) {
  return static_cast<float>(static_cast<double>(left) - static_cast<double>(right));
}

float product(float left, float right) {
  return static_cast<float>(static_cast<double>(left) * static_cast<double>(right));
}

bool is_outlier(float x, float step) {
  const float quotient = static_cast<float>(static_cast<double>(x) / static_cast<double>(step));
  return !(std::fabs(std::nearbyint(quotient)) <= 127.0f);
}

float remainder(float x, float step) { return difference(x, product(std::copysign(127.0f, x), step)); }

// Returns how many outliers there are.
std::size_t check_outliers(FindOutliersFunction* function, const std::vector<float>& input, std::size_t width,
                           float step) {
  const std::size_t num_rows = input.size() / width, blocks = (width + 15) / 16;
  const GuardedBuffer<float> guarded_input(input), remainders(input.size());
  const GuardedBuffer<std::int32_t> rows(input.size());
  const GuardedBuffer<std::int32_t> block_counts(std::vector<std::int32_t>(blocks, 99));
  const GuardedBuffer<std::int32_t> counts(std::vector<std::int32_t>(width, 99));
  const FindOutliersArgs args = {.input = guarded_input.data(),
                                 .step = step,
                                 .lists = {.block_counts = block_counts.data(),
                                           .counts = counts.data(),
                                           .rows = rows.data(),
                                           .remainders = remainders.data()},
                                 .num_rows = num_rows,
                                 .width = width};
  for (std::size_t block = blocks; block-- > 0;) function(args, block, block + 1);

  std::size_t total = 0;
  std::vector<std::int32_t> in_block(blocks);
  for (std::size_t k = 0; k < width; ++k) {
    const std::string where = "channel " + std::to_string(k) + " of " + std::to_string(width) + ": ";
    std::size_t count = 0;
    for (std::size_t row = 0; row < num_rows; ++row) {
      const float x = input[row * width + k];
      if (!is_outlier(x, step)) continue;
      const std::size_t place = k * num_rows + count++;
      const std::string what = where + std::to_string(x) + " in row " + std::to_string(row);
      check(rows[place] == static_cast<std::int32_t>(row), [&] { return what + " is not where it belongs"; });
      check(same(remainders[place], remainder(x, step)),
            [&] { return what + " leaves " + std::to_string(remainders[place]); });
    }
    check(counts[k] == static_cast<std::int32_t>(count),
          [&] { return where + std::to_string(counts[k]) + " outliers"; });
    in_block[k / 16] += counts[k];
    total += count;
  }
  check(block_counts.copy() == in_block, "a block's count is not its channels'");
  return total;
}

void test_find_at_widths(FindOutliersFunction* function) {
  for (std::size_t width = 1; width <= 70; ++width) {
    for (const std::size_t num_rows : {1u, 3u, 33u}) {
      const std::vector<float> input =
          Random(static_cast<std::uint32_t>(width)).floats(num_rows * width, 1.0f);
      check(check_outliers(function, input, width, 1.0f) == 0, "outliers in rows without outliers");
      check(check_outliers(function, input, width, 1e-12f) > 0, "no outliers");
      for (const float step : {0.0075f, 0.004f}) check_outliers(function, input, width, step);
    }
  }
  check(check_outliers(function, std::vector<float>(5 * 33, -2.0f), 33, 0.01f) == 5 * 33,
        "some are not found");
  check(check_outliers(function, std::vector<float>(5 * 33, -0.0f), 33, 0.01f) == 0, "a zero is found");
}

void test_find_at_the_threshold(FindOutliersFunction* function) {
  std::vector<float> steps = Random(3).floats(200, 1.0f);
  for (float& step : steps) step = std::fabs(step) + 0x1p-20f;
  steps.insert(steps.end(), {1.0f, 0.3f, 0x1p-149f, 3 * 0x1p-149f, 0x1p-126f, 1e-38f, 1e30f, kMost / 128.0f});
  for (const float step : steps) {
    std::vector<float> input = {0.0f, -0.0f, 0x1p-149f, -0x1p-149f};
    for (const float levels : {126.5f, 127.0f, 127.5f, 128.0f, 128.5f}) {
      const float x = product(levels, step);
      for (const float near : {std::nextafter(x, 0.0f), x, std::nextafter(x, kInfinity)}) {
        input.insert(input.end(), {near, -near});
      }
    }
    check(check_outliers(function, input, input.size(), step) > 0, "no outliers");
  }
  // Ties round to the even 128; smaller values are not outliers.
  check(check_outliers(function, {127.5f, -127.5f}, 2, 1.0f) == 2, "a tie is no outlier");
  const float below = std::nextafter(127.5f, 0.0f);
  check(check_outliers(function, {below, -below}, 2, 1.0f) == 0, "an outlier below the tie");
}

void test_find_extremes(FindOutliersFunction* function) {
  for (const float step : {0x1p-149f, 0x1p-126f, 1e-30f, 1.0f, 1e30f, kMost}) {
    std::vector<float> input = {0.0f, 0x1p-149f, 0x1p-126f, 1e-30f, 1.0f, 1e9f, kMost, kInfinity};
    const std::size_t count = input.size();
    for (std::size_t i = 0; i < count; ++i) input.push_back(-input[i]);
    input.push_back(kNan);
    check(check_outliers(function, input, input.size(), step) >= 3, "a non-finite value is hidden");
    check_outliers(function, input, 1, step);
  }
}

void test_dequantize(DequantizeRowFunction* function) {
  for (const std::size_t depth : {1u, 4u, 7u}) {
    for (std::size_t columns = 1; columns <= 50; ++columns) {
      const std::size_t groups = (depth + 3) / 4, blocks = (columns + 15) / 16;
      const std::vector<std::int8_t> packed = Random(5).int8s(blocks * groups * kGemmBytesPerGroup);
      const GuardedBuffer<std::int8_t> guarded_packed(packed);
      std::vector<float> scales = Random(6).floats(columns, 1e-2f);
      scales[0] = 3 * 0x1p-149f;
      const GuardedBuffer<float> guarded_scales(scales);
      for (std::size_t channel = 0; channel < depth; ++channel) {
        std::vector<float> expected(columns);
        for (std::size_t n = 0; n < columns; ++n) {
          const std::size_t place = ((n / 16 * groups + channel / 4) * 16 + n % 16) * 4 + channel % 4;
          expected[n] = product(static_cast<float>(packed[place]), scales[n]);
        }
        for (std::size_t begin = 0; begin < blocks; ++begin) {
          const std::size_t count = columns - begin * 16;
          const GuardedBuffer<float> out(count);
          function({.packed = guarded_packed.data(),
                    .scales = guarded_scales.data(),
                    .out = out.data(),
                    .channel = channel,
                    .columns = columns,
                    .groups = groups},
                   begin, blocks);
          check_same(out.data(), expected.data() + begin * 16, count,
                     "channel " + std::to_string(channel) + " of " + std::to_string(depth) +
                         ", columns from " + std::to_string(begin * 16) + " to " + std::to_string(columns));
        }
      }
    }
  }
}

void check_outer_product(AddOuterProductFunction* function, const std::vector<std::int32_t>& rows,
                         const std::vector<float>& left, const std::vector<float>& right,
                         std::size_t stride) {
  const std::size_t columns = right.size(), num_rows = 5;
  std::vector<float> expected = Random(7).floats((num_rows - 1) * stride + columns, 1.0f);
  const GuardedBuffer<std::int32_t> guarded_rows(rows);
  const GuardedBuffer<float> guarded_left(left), guarded_right(right), out(expected);
  function({.rows = guarded_rows.data(),
            .left = guarded_left.data(),
            .right = guarded_right.data(),
            .out = out.data(),
            .count = rows.size(),
            .columns = columns,
            .out_stride = stride});
  for (std::size_t i = 0; i < rows.size(); ++i) {
    float* row = expected.data() + static_cast<std::size_t>(rows[i]) * stride;
    for (std::size_t n = 0; n < columns; ++n) {
      row[n] =
          static_cast<float>(static_cast<double>(row[n]) + static_cast<double>(product(left[i], right[n])));
    }
  }
  check_same(out.data(), expected.data(), expected.size(), std::to_string(columns) + " columns");
}

void test_outer_product(AddOuterProductFunction* function) {
  for (std::size_t columns = 1; columns <= 70; ++columns) {
    const std::vector<float> right = Random(8).floats(columns, 2.0f);
    for (const std::size_t stride : {columns, columns + 3}) {
      check_outer_product(function, {}, {}, right, stride);
      check_outer_product(function, {0, 1, 4}, {0.3f, -1e30f, 1e-38f}, right, stride);
      check_outer_product(function, {2, 3}, {kInfinity, kNan}, right, stride);
    }
  }
}

}  // namespace

void test_shadow(Suite& suite) {
  suite.run_rows(find_outliers_f32_f32, "its definition at every width", test_find_at_widths);
  suite.run_rows(find_outliers_f32_f32, "around the threshold", test_find_at_the_threshold);
  suite.run_rows(find_outliers_f32_f32, "from nothing to NaN", test_find_extremes);
  suite.run_rows(dequantize_row_f32_s8col, "every channel and column", test_dequantize);
  suite.run_rows(add_outer_product_f32_f32_f32, "its definition at every width", test_outer_product);
}

}  // namespace chunkrt::testing
