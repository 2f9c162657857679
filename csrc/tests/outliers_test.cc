// Compares outliers on every instruction set with the definition, and the definition with plain arithmetic.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

struct Taken {
  std::vector<float> rest, values;
  std::vector<std::int32_t> counts, channels;
};

Taken take(TakeOutliersFunction* function, const std::vector<float>& input, std::size_t width) {
  const std::size_t rows = input.size() / width, capacity = most_outliers(width);
  const GuardedBuffer<float> guarded_input(input), rest(rows * width), values(rows * capacity);
  const GuardedBuffer<std::int32_t> counts(rows), channels(rows * capacity);
  const TakeOutliersArgs args = {.input = guarded_input.data(),
                                 .rest = rest.data(),
                                 .outliers = {.counts = counts.data(),
                                              .channels = channels.data(),
                                              .values = values.data(),
                                              .capacity = capacity},
                                 .width = width};
  for (std::size_t row = rows; row-- > 0;) function(args, row, row + 1);
  return {rest.copy(), values.copy(), counts.copy(), channels.copy()};
}

// One row has no outliers, one has very many, one has a few, one is zero, two are not finite, and in
// one a third of the values are the smallest positive number.
std::vector<float> rows_of_every_kind(std::size_t width) {
  Random random(static_cast<std::uint32_t>(width));
  std::vector<float> input = random.floats(7 * width, 1.0f);
  for (std::size_t k = 0; k < width; ++k) {
    input[width + k] = k % 12 == 0 ? -3.0f : 1e-6f;
    if (k % 50 == 7) input[2 * width + k] *= 1e4f;
    input[3 * width + k] = 0.0f;
    input[6 * width + k] = k % 3 == 0 ? std::numeric_limits<float>::denorm_min() : 0.0f;
  }
  input[4 * width + width / 2] = std::numeric_limits<float>::infinity();
  input[5 * width] = std::numeric_limits<float>::quiet_NaN();
  return input;
}

void test_take(TakeOutliersFunction* function) {
  for (const std::size_t width : {1u, 3u, 4u, 15u, 16u, 17u, 31u, 64u, 100u, 576u, 1537u}) {
    const std::vector<float> input = rows_of_every_kind(width);
    const Taken found = take(function, input, width);
    const std::size_t capacity = most_outliers(width);
    for (std::size_t row = 0; row < 7; ++row) {
      const std::string where = "width " + std::to_string(width) + ", row " + std::to_string(row);
      const float* x = input.data() + row * width;
      double sum = 0;
      for (std::size_t k = 0; k < width; ++k) sum += std::fabs(static_cast<double>(x[k]));
      // The limit is a float, because no values exist between the smallest numbers.
      const float limit = static_cast<float>(8.0 * sum / static_cast<double>(width));
      std::int32_t count = 0;
      for (std::size_t k = 0; k < width; ++k) {
        const bool is_finite = row != 4 && row != 5;
        const bool is_outlier = is_finite && std::fabs(x[k]) > limit;
        const float expected = is_outlier ? 0.0f : x[k];
        check_same(&found.rest[row * width + k], &expected, 1, where + ", the rest");
        if (!is_outlier) continue;
        const std::size_t place = row * capacity + static_cast<std::size_t>(count++);
        check(found.channels[place] == static_cast<std::int32_t>(k),
              [&] { return where + ": a channel is wrong"; });
        check_same(&found.values[place], &x[k], 1, where + ", an outlier");
      }
      check(found.counts[row] == count, [&] {
        return where + " has " + std::to_string(found.counts[row]) + " outliers, expected " +
               std::to_string(count);
      });
      if (row == 1 && width >= 17) check(count > 0, [&] { return where + ": this test has no outliers"; });
    }
  }
}

// int8 weights [depth, columns] in the layout of kernels/gemm.
std::vector<std::int8_t> packed(const std::vector<std::int8_t>& weight, std::size_t depth,
                                std::size_t columns) {
  const std::size_t groups = (depth + 3) / 4;
  std::vector<std::int8_t> out((columns + 15) / 16 * groups * 64);
  for (std::size_t k = 0; k < depth; ++k) {
    for (std::size_t n = 0; n < columns; ++n) {
      out[((n / 16 * groups + k / 4) * 16 + n % 16) * 4 + k % 4] = weight[k * columns + n];
    }
  }
  return out;
}

void test_add(AddOutliersFunction* function) {
  constexpr std::size_t kDepth = 200;
  for (const std::size_t columns : {1u, 4u, 15u, 16u, 17u, 47u, 48u, 49u, 209u}) {
    const std::vector<float> input = rows_of_every_kind(kDepth);
    Taken taken = take(take_outliers_f32_f32_reference, input, kDepth);
    const std::size_t rows = taken.counts.size();
    Random random(static_cast<std::uint32_t>(columns));
    const std::vector<std::int8_t> weight = random.int8s(kDepth * columns);
    const std::vector<float> scales = random.floats(columns, 0.1f),
                             before = random.floats(rows * columns, 9.0f);
    const GuardedBuffer<std::int8_t> guarded(packed(weight, kDepth, columns));
    const GuardedBuffer<float> guarded_scales(scales), out(before);
    const AddOutliersArgs args = {.outliers = {.counts = taken.counts.data(),
                                               .channels = taken.channels.data(),
                                               .values = taken.values.data(),
                                               .capacity = most_outliers(kDepth)},
                                  .packed = guarded.data(),
                                  .scales = guarded_scales.data(),
                                  .out = out.data(),
                                  .rows = rows,
                                  .columns = columns,
                                  .groups = (kDepth + 3) / 4};
    const std::size_t blocks = (columns + 15) / 16;
    function(args, blocks / 2, blocks);
    function(args, 0, blocks / 2);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t n = 0; n < columns; ++n) {
        float sum = 0.0f;
        for (std::int32_t i = 0; i < taken.counts[row]; ++i) {
          const std::size_t place = row * most_outliers(kDepth) + static_cast<std::size_t>(i);
          const std::size_t k = static_cast<std::size_t>(taken.channels[place]);
          sum = std::fma(taken.values[place], static_cast<float>(weight[k * columns + n]), sum);
        }
        float expected = before[row * columns + n];
        if (taken.counts[row] > 0) expected = std::fma(sum, scales[n], expected);
        check_same(out.data() + row * columns + n, &expected, 1,
                   "row " + std::to_string(row) + ", column " + std::to_string(n));
      }
    }
  }
}

void test_add_blocks(AddBlockOutliersFunction* function) {
  constexpr std::size_t kDepth = 224, kBlocksOfDepth = 7;
  for (const std::size_t columns : {1u, 4u, 15u, 16u, 17u, 47u, 209u}) {
    Taken taken = take(take_outliers_f32_f32_reference, rows_of_every_kind(kDepth), kDepth);
    const std::size_t rows = taken.counts.size(), blocks = (columns + 15) / 16;
    Random random(static_cast<std::uint32_t>(columns));
    std::vector<std::uint8_t> bytes;
    for (const std::int8_t byte : random.int8s(blocks * kBlocksOfDepth * kBlockBytes)) {
      bytes.push_back(static_cast<std::uint8_t>(byte));
    }
    std::vector<std::uint16_t> halves;  // finite, of both signs
    for (const std::int8_t half : random.int8s(blocks * kBlocksOfDepth * 2 * kBlockColumns)) {
      halves.push_back(static_cast<std::uint16_t>(0x2000 + half * 64));
    }
    const std::vector<float> before = random.floats(rows * columns, 9.0f);
    const GuardedBuffer<std::uint8_t> right(bytes);
    const GuardedBuffer<std::uint16_t> right_scales(halves);
    const GuardedBuffer<float> out(before);
    std::vector<float> expected = before;
    AddBlockOutliersArgs args = {.outliers = {.counts = taken.counts.data(),
                                              .channels = taken.channels.data(),
                                              .values = taken.values.data(),
                                              .capacity = most_outliers(kDepth)},
                                 .right = right.data(),
                                 .right_scales = right_scales.data(),
                                 .out = out.data(),
                                 .rows = rows,
                                 .columns = columns,
                                 .depth_blocks = kBlocksOfDepth};
    function(args, blocks / 2, blocks);
    function(args, 0, blocks / 2);
    args.out = expected.data();
    add_outliers_f32_u4block_reference(args, 0, blocks);
    check(expected != before, "this test has no outliers");
    check_same(out.data(), expected.data(), expected.size(), std::to_string(columns) + " columns");
  }
}

}  // namespace

void test_outliers(Suite& suite) {
  suite.run_rows(take_outliers_f32_f32, "rows of every kind", test_take);
  suite.run_rows(add_outliers_f32_s8col, "its definition at every width", test_add);
  suite.run_rows(add_outliers_f32_u4block, "the portable one", test_add_blocks);
}

}  // namespace chunkrt::testing
