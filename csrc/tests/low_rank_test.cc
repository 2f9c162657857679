// Compares low_rank on every instruction set with the definition, bit for bit.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

std::string at(std::size_t row, std::size_t column) {
  return "row " + std::to_string(row) + ", column " + std::to_string(column);
}

void test_down(LowRankDownFunction* function) {
  for (const std::size_t rows : {1u, 3u, 6u, 13u}) {
    for (const std::size_t depth : {1u, 2u, 5u, 64u, 99u}) {
      Random random(static_cast<std::uint32_t>(rows * 100 + depth));
      const std::vector<float> left = random.floats(rows * depth, 1.0f), a = random.floats(depth * 16, 1.0f);
      const GuardedBuffer<float> guarded_left(left), guarded_a(a);
      std::vector<float> parts(4 * rows * 16), sums(rows * 16);
      for (std::size_t m = 0; m < rows; ++m) {
        for (std::size_t j = 0; j < 16; ++j) {
          const std::size_t length = (depth + 3) / 4;
          float found[4] = {};
          for (std::size_t k = 0; k < depth; ++k) {
            found[k / length] = std::fma(left[m * depth + k], a[k * 16 + j], found[k / length]);
          }
          for (std::size_t part = 0; part < 4; ++part) parts[(part * rows + m) * 16 + j] = found[part];
          sums[m * 16 + j] = (found[0] + found[1]) + (found[2] + found[3]);
        }
      }
      const GuardedBuffer<float> out_parts(4 * rows * 16), out(rows * 16);
      LowRankDownArgs args = {.left = guarded_left.data(),
                              .a = guarded_a.data(),
                              .out = out.data(),
                              .out_stride = 16,
                              .part_stride = 0,
                              .rows = rows,
                              .depth = depth};
      function(args, 0, 4);
      check_same(out.data(), sums.data(), sums.size(), "sums of depth " + std::to_string(depth));
      args.out = out_parts.data();
      args.part_stride = rows * 16;
      function(args, 3, 4);
      function(args, 0, 3);
      check_same(out_parts.data(), parts.data(), parts.size(), "parts of depth " + std::to_string(depth));
    }
  }
}

// Blocks of columns without ranks, with all ranks, and with different ranges of ranks.
void test_up(LowRankUpFunction* function) {
  constexpr std::size_t kRanks = 21;
  for (const std::size_t rows : {1u, 5u, 6u, 12u, 14u}) {
    for (const std::size_t columns : {1u, 16u, 33u, 64u, 331u}) {
      Random random(static_cast<std::uint32_t>(rows * 1000 + columns));
      const std::size_t blocks = (columns + 15) / 16;
      std::vector<LowRankSpan> spans;
      std::size_t num_stored = 0;
      for (std::size_t block = 0; block < blocks; ++block) {
        const std::size_t kind = block / 5 % 4;
        const LowRankSpan span = {.first_rank = kind == 1 ? 7u : 0u,
                                  .num_ranks = kind == 2   ? 0u
                                               : kind == 1 ? 9u
                                                           : kRanks,
                                  .first_row = num_stored};
        spans.push_back(span);
        num_stored += span.num_ranks;
      }
      const std::vector<float> left = random.floats(rows * kRanks, 1.0f);
      const std::vector<float> b = random.floats(num_stored * 16, 1.0f);
      std::vector<float> expected = random.floats(rows * columns, 1.0f);
      const GuardedBuffer<float> guarded_left(left), guarded_b(b), out(expected);
      const LowRankUpArgs args = {.left = guarded_left.data(),
                                  .left_stride = kRanks,
                                  .b = guarded_b.data(),
                                  .spans = spans.data(),
                                  .out = out.data(),
                                  .rows = rows,
                                  .columns = columns};
      function(args, blocks / 2, blocks);
      function(args, 0, blocks / 2);
      for (std::size_t m = 0; m < rows; ++m) {
        for (std::size_t n = 0; n < columns; ++n) {
          const auto [first_rank, num_ranks, first_row] = spans[n / 16];
          float& sum = expected[m * columns + n];
          for (std::size_t j = 0; j < num_ranks; ++j) {
            sum = std::fma(left[m * kRanks + first_rank + j], b[(first_row + j) * 16 + n % 16], sum);
          }
          check_same(out.data() + m * columns + n, &sum, 1, at(m, n));
        }
      }
    }
  }
}

}  // namespace

void test_low_rank(Suite& suite) {
  suite.run_rows(low_rank_down_f32_f32, "its definition at every size, in sums and in parts", test_down);
  suite.run_rows(low_rank_up_f32_f32, "its definition at every size, with any ranks of blocks", test_up);
}

}  // namespace chunkrt::testing
