// Compares gemm with the exact int64 sum and the epilogue of gemm.h, in guarded memory.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/gemm/arranged.h"
#include "kernels/gemm/parted.h"
#include "tests/gemm_by_tiles.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

struct Shape {
  std::size_t rows, depth, columns;
};

// The row arrangement of one implementation, if this processor supports it; the other implementations ignore
// it.
std::optional<RowArrangement> arrangement() {
  CHUNKRT_ON_X86(if (is_supported(Isa::avx2)) return RowArrangement{part_rows_avx2, parted_row_bytes, 1};)
  CHUNKRT_ON_ARM(
      if (is_supported(Isa::neon_i8mm)) return RowArrangement{pair_rows_neon_i8mm, paired_row_bytes, 2};)
  return {};
}

std::vector<std::int8_t> arranged(const std::int8_t* left, std::size_t rows, std::size_t groups) {
  const std::optional<RowArrangement> how = arrangement();
  if (!how) return {};
  const std::size_t whole = (rows + how->rows_together - 1) / how->rows_together * how->rows_together;
  std::vector<std::int8_t> out(whole * how->row_bytes(groups), 99);
  how->arrange(left, groups, 0, rows, out.data());
  return out;
}

// The arguments of the rows from `row` on.
GemmArgs rows_from(GemmArgs args, std::size_t row) {
  args.rows -= row;
  args.left += row * args.groups * kGemmDepthPerGroup;
  args.left_scales += row;
  args.left_sums += row;
  if (args.residual != nullptr) args.residual += row * args.residual_stride;
  const std::optional<RowArrangement> how = arrangement();
  if (!how || row % how->rows_together != 0) {
    args.arranged = nullptr;
  } else {
    args.arranged += row * how->row_bytes(args.groups);
  }
  return args;
}

std::string describe(const Shape& shape) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.depth) + " x " +
         std::to_string(shape.columns);
}

// The exact product. It is kept, because all implementations are tested with the same operands.
const std::vector<std::int64_t>& exact_sums(const Shape& shape, const std::vector<std::int8_t>& left,
                                            const std::vector<std::int8_t>& right) {
  static std::map<std::tuple<std::size_t, std::vector<std::int8_t>, std::vector<std::int8_t>>,
                  std::vector<std::int64_t>>
      known;
  const auto [place, is_new] = known.try_emplace({shape.depth, left, right});
  std::vector<std::int64_t>& sums = place->second;
  if (!is_new) return sums;
  sums.resize(shape.rows * shape.columns);
  for (std::size_t m = 0; m < shape.rows; ++m) {
    for (std::size_t k = 0; k < shape.depth; ++k) {
      for (std::size_t n = 0; n < shape.columns; ++n) {
        sums[m * shape.columns + n] +=
            std::int64_t{left[m * shape.depth + k]} * std::int64_t{right[k * shape.columns + n]};
      }
    }
  }
  return sums;
}

// One product: int8 operands, plain and in the kernels' layout.
struct Problem {
  Problem(const Shape& shape_, const std::vector<std::int8_t>& left, const std::vector<std::int8_t>& right)
      : shape(shape_),
        groups((shape.depth + kGemmDepthPerGroup - 1) / kGemmDepthPerGroup),
        blocks((shape.columns + kGemmColumnsPerBlock - 1) / kGemmColumnsPerBlock),
        padded_left(shape.rows * groups * kGemmDepthPerGroup),
        packed_right(blocks * groups * kGemmBytesPerGroup),
        left_scales(Random(3).floats(shape.rows, 0.01f)),
        right_scales(Random(4).floats(shape.columns, 0.01f)),
        bias(Random(5).floats(shape.columns, 1.0f)),
        residual(Random(6).floats(shape.rows * (shape.columns + 1), 1.0f)),
        left_sums(shape.rows),
        sums(exact_sums(shape, left, right)) {
    for (std::size_t m = 0; m < shape.rows; ++m) {
      for (std::size_t k = 0; k < shape.depth; ++k) {
        padded_left[m * groups * kGemmDepthPerGroup + k] = left[m * shape.depth + k];
        left_sums[m] += left[m * shape.depth + k];
      }
    }
    for (std::size_t k = 0; k < shape.depth; ++k) {
      for (std::size_t n = 0; n < shape.columns; ++n) {
        const std::size_t block = n / 16, group = k / 4;
        packed_right[((block * groups + group) * 16 + n % 16) * 4 + k % 4] = right[k * shape.columns + n];
      }
    }
    arranged_left.emplace(arranged(padded_left.data(), shape.rows, groups));
  }

  explicit Problem(const Shape& shape_)
      : Problem(shape_, Random(1).int8s(shape_.rows * shape_.depth),
                Random(2).int8s(shape_.depth * shape_.columns)) {}

  GemmArgs args(float* out, bool has_bias, bool has_residual) const {
    return {.left = padded_left.data(),
            .left_scales = left_scales.data(),
            .left_sums = left_sums.data(),
            .right = packed_right.data(),
            .right_scales = right_scales.data(),
            .bias = has_bias ? bias.data() : nullptr,
            .residual = has_residual ? residual.data() : nullptr,
            .out = out,
            .rows = shape.rows,
            .columns = shape.columns,
            .groups = groups,
            .residual_stride = shape.columns + 1,
            .out_stride = shape.columns,
            .arranged = arrangement() ? arranged_left->data() : nullptr};
  }

  std::vector<float> expected(bool has_bias, bool has_residual) const {
    std::vector<float> out(sums.size());
    for (std::size_t m = 0; m < shape.rows; ++m) {
      for (std::size_t n = 0; n < shape.columns; ++n) {
        float value = static_cast<float>(sums[m * shape.columns + n]);
        value = value * left_scales[m];
        value = value * right_scales[n];
        if (has_bias) value = value + bias[n];
        if (has_residual) value = value + residual[m * (shape.columns + 1) + n];
        out[m * shape.columns + n] = value;
      }
    }
    return out;
  }

  Shape shape;
  std::size_t groups, blocks;
  GuardedBuffer<std::int8_t> padded_left, packed_right;
  GuardedBuffer<float> left_scales, right_scales, bias, residual;
  GuardedBuffer<std::int32_t> left_sums;
  std::optional<GuardedBuffer<std::int8_t>> arranged_left;
  const std::vector<std::int64_t>& sums;
};

void check_problem(GemmFunction* function, const Problem& problem, bool has_bias, bool has_residual) {
  const std::vector<float> expected = problem.expected(has_bias, has_residual);
  GuardedBuffer<float> out(expected.size());
  const GemmArgs args = problem.args(out.data(), has_bias, has_residual);
  function(args, 0, problem.blocks);
  check_same(out.data(), expected.data(), expected.size(), describe(problem.shape));

  std::fill_n(out.data(), out.size(), std::numeric_limits<float>::quiet_NaN());
  for (std::size_t block = problem.blocks; block-- > 0;) function(args, block, block + 1);
  check_same(out.data(), expected.data(), expected.size(), describe(problem.shape) + ", block by block");

  GemmArgs as_they_are = args;
  as_they_are.arranged = nullptr;
  std::fill_n(out.data(), out.size(), std::numeric_limits<float>::quiet_NaN());
  function(as_they_are, 0, problem.blocks);
  check_same(out.data(), expected.data(), expected.size(), describe(problem.shape) + ", not arranged");
}

// Tests rows, depths and columns at the edges of all kernels' tiles.
void test_shapes(GemmFunction* function) {
  for (const std::size_t rows : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 31u, 32u, 33u}) {
    for (const std::size_t depth : {1u, 3u, 4u, 5u, 8u, 12u, 15u, 16u, 17u, 63u, 64u, 65u}) {
      for (const std::size_t columns : {1u, 3u, 4u, 7u, 8u, 9u, 15u, 16u, 17u, 31u, 33u, 48u}) {
        check_problem(function, Problem({rows, depth, columns}), rows % 2 == 0, depth % 2 == 0);
      }
    }
  }
}

// Tests products that are deeper than one step of any kernel, and wider than any tile.
void test_large(GemmFunction* function) {
  for (const std::size_t rows : {1u, 6u, 16u, 33u}) {
    for (const std::size_t depth : {1023u, 1024u, 1025u, 1100u}) {
      for (const std::size_t columns : {47u, 65u, 97u}) {
        check_problem(function, Problem({rows, depth, columns}), true, columns % 3 == 2);
      }
    }
  }
}

void test_epilogues(GemmFunction* function) {
  const Problem problem({5, 37, 29});
  for (const bool has_bias : {false, true}) {
    for (const bool has_residual : {false, true}) check_problem(function, problem, has_bias, has_residual);
  }
}

// The residual may be the output itself.
void test_residual_in_place(GemmFunction* function) {
  for (const std::size_t rows : {1u, 2u, 7u, 33u}) {
    const Problem problem({rows, 37, 29});
    const std::vector<float> expected = problem.expected(true, true);
    const GuardedBuffer<float> out(problem.residual.copy());
    GemmArgs args = problem.args(out.data(), true, false);
    args.residual = out.data();
    args.out_stride = args.residual_stride;
    function(args, 0, problem.blocks);
    for (std::size_t row = 0; row < rows; ++row) {
      check_same(out.data() + row * args.out_stride, expected.data() + row * args.columns, args.columns,
                 describe(problem.shape) + ", row " + std::to_string(row));
    }
  }
}

// Tests all pairs of ends of the int8 range, for which 16-bit partial sums would saturate or wrap.
void test_extremes(GemmFunction* function) {
  for (const int left : {-128, -127, 127}) {
    for (const int right : {-128, -127, 127}) {
      const Shape shape = {3, 576, 17};
      check_problem(function,
                    Problem(shape, std::vector(shape.rows * shape.depth, static_cast<std::int8_t>(left)),
                            std::vector(shape.depth * shape.columns, static_cast<std::int8_t>(right))),
                    false, false);
    }
  }
}

void test_mixed_extremes(GemmFunction* function) {
  const auto ends = [](std::vector<std::int8_t> values) {
    for (std::int8_t& value : values) value = value < -40 ? -128 : value < 40 ? -127 : 127;
    return values;
  };
  for (const std::size_t rows : {1u, 7u, 33u}) {
    const Shape shape = {rows, 577, 49};
    check_problem(function,
                  Problem(shape, ends(Random(7).int8s(shape.rows * shape.depth)),
                          ends(Random(8).int8s(shape.depth * shape.columns))),
                  true, true);
  }
}

// Activations like those of quantisation by row: most are small, and one in `rarity` is at an end of int8, so
// that few adjacent ones are large. In the last quarter of the depth all are large.
void test_rare_extremes(GemmFunction* function) {
  for (const std::size_t rows : {1u, 2u, 3u, 4u, 5u, 9u}) {
    for (const std::size_t depth : {7u, 32u, 36u, 63u, 576u, 1023u, 1028u, 2100u}) {
      for (const int rarity : {1000, 50, 10, 3}) {
        const Shape shape = {rows, depth, 113};
        std::vector<std::int8_t> left = Random(9).int8s(rows * depth);
        const std::vector<std::int8_t> draws = Random(10).int8s(2 * rows * depth);
        for (std::size_t i = 0; i < left.size(); ++i) {
          const int draw = (draws[2 * i] + 128) * 256 + draws[2 * i + 1] + 128;
          if (i % depth >= depth - depth / 4 || draw % rarity == 0) {
            left[i] = draw & 1 ? 127 : -128;
          } else {
            left[i] = static_cast<std::int8_t>(left[i] / 3);
          }
        }
        // A column for each end of int8, in which a single missed pair would saturate.
        std::vector<std::int8_t> right = Random(11).int8s(depth * shape.columns);
        for (std::size_t i = 0; i < right.size(); ++i) {
          const std::size_t column = i % shape.columns;
          if (column % 3 != 2) right[i] = column % 3 == 0 ? 127 : -128;
        }
        check_problem(function, Problem(shape, left, right), rows % 2 == 0, depth % 2 == 0);
      }
    }
  }
}

// Groups of four, in every place, whose sum is the largest that fits in int16 or one larger, with one sign or
// both, and weights at one end: an element that is added too early would wrap or saturate.
void test_edges_of_fours(GemmFunction* function) {
  const std::vector<std::vector<int>> fours = {
      {32, 32, 32, 32},   {33, 32, 32, 32},       {127, 1, 0, 0},   {127, 2, 0, 0},
      {64, 64, 0, 0},     {64, 65, 0, 0},         {0, 0, 127, 127}, {127, 127, 127, 127},
      {127, 1, -127, -1}, {127, 2, -127, -2},     {-128, 0, 0, 0},  {-128, -1, 0, 0},
      {-128, -128, 0, 0}, {-128, 127, -128, 127}, {96, 0, 96, 0},   {-32, -32, -32, -33}};
  for (const std::size_t groups : {1u, 2u, 3u, 8u, 9u, 24u}) {
    const Shape shape = {fours.size(), groups * kGemmDepthPerGroup, 33};
    for (std::size_t place = 0; place < groups * kGemmDepthPerGroup; ++place) {
      std::vector<std::int8_t> left(shape.rows * shape.depth), right(shape.depth * shape.columns);
      for (std::size_t m = 0; m < shape.rows; ++m) {
        // From `place` on: k, k + 1, k + 4, k + 5 as far as they exist.
        for (std::size_t i = 0; i < 4; ++i) {
          const std::size_t k = place / 2 * 2 + i % 2 + i / 2 * kGemmDepthPerGroup;
          if (k < shape.depth)
            left[m * shape.depth + k] = static_cast<std::int8_t>(fours[m][(i + place) % 4]);
        }
      }
      for (std::size_t i = 0; i < right.size(); ++i) right[i] = i % shape.columns % 2 == 0 ? 127 : -128;
      check_problem(function, Problem(shape, left, right), false, false);
    }
  }
}

// The fitting part and the excess add up to the row; both are within the bounds of parted.h.
[[maybe_unused]] void test_parts() {
  for (const std::size_t groups : {1u, 2u, 7u, 8u, 9u, 16u, 144u, 145u}) {
    for (const int spread : {1, 2, 4, 16}) {
      const std::size_t depth = groups * kGemmDepthPerGroup, rows = 40;
      GuardedBuffer<std::int8_t> values(rows * depth), parted(rows * parted_row_bytes(groups));
      const std::vector<std::int8_t> drawn = Random(12).int8s(values.size());
      for (std::size_t i = 0; i < drawn.size(); ++i) {
        values[i] = static_cast<std::int8_t>(i % 29 == 0 ? drawn[i] : drawn[i] / spread);
      }
      CHUNKRT_ON_X86(part_rows_avx2(values.data(), groups, 0, rows, parted.data());)
      for (std::size_t m = 0; m < rows; ++m) {
        const std::int8_t* const row = parted.data() + m * parted_row_bytes(groups);
        const std::int8_t* const fits = row + kPartedHeaderBytes;
        const std::string what = std::to_string(groups) + " groups, row " + std::to_string(m);
        std::int32_t num_excess;
        std::memcpy(&num_excess, row, sizeof(num_excess));
        check(num_excess != kNotParted || spread < 16, [&] { return what + " is not parted"; });
        if (num_excess == kNotParted) continue;
        std::vector<int> sum(fits, fits + parted_values_bytes(groups));
        for (std::size_t k = 0; k < sum.size(); k += 8) {
          for (const std::size_t first : {k, k + 2}) {
            int above = 0, below = 0;
            for (const std::size_t each : {first, first + 1, first + 4, first + 5}) {
              (sum[each] > 0 ? above : below) += sum[each];
            }
            check(above <= 128 && below >= -128, [&] { return what + ": a four does not fit"; });
          }
        }
        for (std::int32_t i = 0; i < num_excess; ++i) {
          GemmExcess excess;
          std::memcpy(&excess,
                      fits + parted_values_bytes(groups) + static_cast<std::size_t>(i) * sizeof(excess),
                      sizeof(excess));
          std::int8_t quad[kGemmDepthPerGroup];
          std::memcpy(quad, &excess.quad, sizeof(quad));
          for (const std::size_t k : {0u, 2u}) {
            check(std::abs(quad[k] + quad[k + 1]) <= 128, [&] { return what + ": an excess does not fit"; });
          }
          for (std::size_t k = 0; k < kGemmDepthPerGroup; ++k) {
            sum.at(static_cast<std::size_t>(excess.group) * kGemmDepthPerGroup + k) += quad[k];
          }
        }
        for (std::size_t k = 0; k < sum.size(); ++k) {
          check(sum[k] == (k < depth ? values[m * depth + k] : 0),
                [&] { return what + ", k = " + std::to_string(k); });
        }
      }
    }
  }
}

void test_largest_depth(GemmFunction* function) {
  const Shape shape = {2, kGemmMaxDepth, 17};
  for (const auto& [left, right] : {std::pair{-128, -128}, std::pair{-128, 127}, std::pair{127, 127}}) {
    const Problem problem(shape, std::vector(shape.rows * shape.depth, static_cast<std::int8_t>(left)),
                          std::vector(shape.depth * shape.columns, static_cast<std::int8_t>(right)));
    constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
    check(std::abs(problem.sums[0]) <= kLimit, "kGemmMaxDepth is too large");
    check(right != -128 || problem.sums[0] + 128 * 128 > kLimit, "kGemmMaxDepth is too small");
    check_problem(function, problem, false, false);
  }
}

// Tests splits of the blocks and of the rows. Canaries around the matrix and in the columns of other blocks
// must not change.
void test_splits(GemmFunction* function) {
  constexpr std::size_t kGuards = 64;
  constexpr float kCanary = 1e30f;
  const Problem problem({33, 1030, 150});
  const std::size_t rows = problem.shape.rows, columns = problem.shape.columns;
  const std::vector<float> expected = problem.expected(true, true);
  for (const auto& [begin, end] :
       std::vector<std::pair<std::size_t, std::size_t>>{{0, 1}, {1, 4}, {4, 9}, {9, 10}, {3, 3}, {0, 10}}) {
    for (const std::size_t rows_at_once : {33u, 16u, 10u}) {
      const GuardedBuffer<float> out(std::vector<float>(kGuards + rows * columns, kCanary));
      for (std::size_t row = 0; row < rows; row += rows_at_once) {
        GemmArgs args = rows_from(problem.args(out.data() + kGuards + row * columns, true, true), row);
        args.rows = std::min(rows_at_once, rows - row);
        function(args, begin, end);
      }
      for (std::size_t i = 0; i < out.size(); ++i) {
        const std::size_t column = (i - kGuards) % columns;
        const bool is_written = i >= kGuards && column >= begin * 16 && column < end * 16;
        check(same(out[i], is_written ? expected[i - kGuards] : kCanary), [&] {
          return "blocks " + std::to_string(begin) + " to " + std::to_string(end) + ", place " +
                 std::to_string(i);
        });
      }
    }
  }
}

// The result of a row does not depend on the other rows.
void test_rows_alone(GemmFunction* function) {
  const Problem problem({33, 64, 48});
  const std::vector<float> expected = problem.expected(true, false);
  std::vector<float> out(expected.size());
  for (std::size_t row = 0; row < problem.shape.rows; ++row) {
    GemmArgs args = rows_from(problem.args(out.data() + row * problem.shape.columns, true, false), row);
    args.rows = 1;
    function(args, 0, problem.blocks);
  }
  check_same(out.data(), expected.data(), expected.size(), "row by row");
}

}  // namespace

void test_gemm(Suite& suite) {
  const auto run = [&](const char* name, void (*test)(GemmFunction*)) {
    suite.run_rows(gemm_f32_s8row_s8col, name, test);
    suite.run(std::string("gemm by the twin of tiles: ") + name, [=] { test(gemm_by_tile_twin); });
#if defined(__linux__) && defined(__x86_64__)
    suite.run(std::string("gemm by tile instructions: ") + name, [=] { test(gemm_by_tile_instructions); });
#endif
  };
  run("exact at tile edges", test_shapes);
  run("exact where large", test_large);
  run("bias and residual", test_epilogues);
  run("residual in place", test_residual_in_place);
  run("ends of int8", test_extremes);
  run("ends of int8 mixed", test_mixed_extremes);
  run("few large neighbours", test_rare_extremes);
  run("edges of fours", test_edges_of_fours);
  run("the largest depth", test_largest_depth);
  run("any split, without stray writes", test_splits);
  run("rows alone", test_rows_alone);
  CHUNKRT_ON_X86(if (is_supported(Isa::avx2)) suite.run("gemm's rows split with AVX2", test_parts);)
}

}  // namespace chunkrt::testing
