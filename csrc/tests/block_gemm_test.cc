// Compares block_gemm with exact int64 sums and the order of roundings in block_gemm.h, in guarded memory.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/gemm/arranged.h"
#include "tests/block_gemm_by_tiles.h"
#include "tests/guarded_buffer.h"
#include "tests/half.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

struct Shape {
  std::size_t rows, depth_blocks, columns;

  std::size_t depth() const { return depth_blocks * 32; }
};

std::string describe(const Shape& shape) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.depth_blocks) + " blocks x " +
         std::to_string(shape.columns);
}

// The operands of block_gemm.h's formula: left [rows, depth], q [depth, columns], scales and minima float16
// [depth_blocks, columns].
struct Operands {
  explicit Operands(const Shape& shape)
      : left(Random(1).int8s(shape.rows * shape.depth())),
        q(shape.depth() * shape.columns),
        scales(shape.depth_blocks * shape.columns),
        minima(scales.size()) {
    for (std::int8_t& value : left) value = std::max(value, std::int8_t{-127});
    const std::vector<std::int8_t> nibbles = Random(2).int8s(q.size());
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<std::uint8_t>(nibbles[i] & 15);
    // Finite float16 values of all magnitudes, a third of them subnormal. Scales are positive, and minima
    // have both signs.
    const std::vector<std::int8_t> bits = Random(3).int8s(4 * scales.size());
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const auto half = [&](std::size_t j) {
        const int fraction = (bits[j] & 0xff) << 2 | (bits[j + 1] & 3);
        return static_cast<std::uint16_t>(fraction | (i % 3 == 0 ? 0 : (bits[j + 1] & 15) << 10));
      };
      scales[i] = half(4 * i);
      minima[i] = static_cast<std::uint16_t>(half(4 * i + 2) | (i % 4 == 0 ? 0 : 0x8000));
    }
  }

  std::vector<std::int8_t> left;
  std::vector<std::uint8_t> q;
  std::vector<std::uint16_t> scales, minima;
};

// The sums before the epilogue. They are kept, because all implementations are tested with the same operands.
const std::vector<float>& sums_of_blocks(const Shape& shape, const Operands& operands) {
  static std::map<std::tuple<std::size_t, std::vector<std::int8_t>, std::vector<std::uint8_t>,
                             std::vector<std::uint16_t>, std::vector<std::uint16_t>>,
                  std::vector<float>>
      known;
  const auto [place, is_new] =
      known.try_emplace({shape.rows, operands.left, operands.q, operands.scales, operands.minima});
  std::vector<float>& sums = place->second;
  if (!is_new) return sums;
  for (std::size_t m = 0; m < shape.rows; ++m) {
    for (std::size_t n = 0; n < shape.columns; ++n) {
      float& value = sums.emplace_back(0.0f);
      for (std::size_t b = 0; b < shape.depth_blocks; ++b) {
        std::int64_t sum = 0, left_sum = 0;
        for (std::size_t k = b * 32; k < b * 32 + 32; ++k) {
          const std::int64_t x = operands.left[m * shape.depth() + k];
          sum += x * operands.q[k * shape.columns + n];
          left_sum += x;
        }
        const auto scale = static_cast<float>(half_value(operands.scales[b * shape.columns + n]));
        const auto minimum = static_cast<float>(half_value(operands.minima[b * shape.columns + n]));
        value = std::fma(static_cast<float>(sum), scale, value);
        value = std::fma(static_cast<float>(left_sum), minimum, value);
      }
    }
  }
  return sums;
}

// One product: the operands, plain and in the kernels' layout.
struct Problem {
  Problem(const Shape& shape_, const Operands& operands_)
      : shape(shape_),
        operands(operands_),
        blocks((shape.columns + 15) / 16),
        left(operands.left),
        packed(blocks * shape.depth_blocks * 256),
        packed_scales(blocks * shape.depth_blocks * 32),
        left_scales(Random(4).floats(shape.rows, 0.01f)),
        bias(Random(5).floats(shape.columns, 1.0f)),
        residual(Random(6).floats(shape.rows * (shape.columns + 1), 1.0f)),
        left_sums(shape.rows * shape.depth_blocks) {
    for (std::size_t m = 0; m < shape.rows; ++m) {
      for (std::size_t k = 0; k < shape.depth(); ++k) {
        left_sums[m * shape.depth_blocks + k / 32] += operands.left[m * shape.depth() + k];
      }
    }
    for (std::size_t n = 0; n < shape.columns; ++n) {
      for (std::size_t k = 0; k < shape.depth(); ++k) {
        const std::size_t b = n / 16 * shape.depth_blocks + k / 32;
        const std::size_t byte = ((b * 4 + k % 32 / 8) * 16 + n % 16) * 4 + k % 4;
        const int q = operands.q[k * shape.columns + n];
        packed[byte] = static_cast<std::uint8_t>(packed[byte] | (k % 8 < 4 ? q : q << 4));
      }
      for (std::size_t b = 0; b < shape.depth_blocks; ++b) {
        const std::size_t place = (n / 16 * shape.depth_blocks + b) * 32 + n % 16;
        packed_scales[place] = operands.scales[b * shape.columns + n];
        packed_scales[place + 16] = operands.minima[b * shape.columns + n];
      }
    }
  }

  explicit Problem(const Shape& shape_) : Problem(shape_, Operands(shape_)) {}

  BlockGemmArgs args(float* out, bool has_bias, bool has_residual) const {
    return {.left = left.data(),
            .left_scales = left_scales.data(),
            .left_sums = left_sums.data(),
            .right = packed.data(),
            .right_scales = packed_scales.data(),
            .bias = has_bias ? bias.data() : nullptr,
            .residual = has_residual ? residual.data() : nullptr,
            .out = out,
            .rows = shape.rows,
            .columns = shape.columns,
            .depth_blocks = shape.depth_blocks,
            .residual_stride = shape.columns + 1,
            .out_stride = shape.columns};
  }

  std::vector<float> expected(bool has_bias, bool has_residual) const {
    std::vector<float> out = sums_of_blocks(shape, operands);
    for (std::size_t m = 0; m < shape.rows; ++m) {
      for (std::size_t n = 0; n < shape.columns; ++n) {
        float& value = out[m * shape.columns + n];
        value = value * left_scales[m];
        if (has_bias) value = value + bias[n];
        if (has_residual) value = value + residual[m * (shape.columns + 1) + n];
      }
    }
    return out;
  }

  Shape shape;
  Operands operands;
  std::size_t blocks;
  GuardedBuffer<std::int8_t> left;
  GuardedBuffer<std::uint8_t> packed;
  GuardedBuffer<std::uint16_t> packed_scales;
  GuardedBuffer<float> left_scales, bias, residual;
  GuardedBuffer<std::int32_t> left_sums;
};

// Calls an implementation with arranged rows and scratch, which some implementations need.
void run(BlockGemmFunction* function, BlockGemmArgs args, std::size_t begin, std::size_t end) {
  std::vector<std::int8_t> arranged;
  CHUNKRT_ON_ARM(if (is_supported(Isa::neon_i8mm)) {
    const std::size_t groups = args.depth_blocks * 8;
    arranged.resize((args.rows + 1) / 2 * 2 * paired_block_row_bytes(groups), 99);
    pair_block_rows_neon_i8mm(args.left, groups, 0, args.rows, arranged.data());
  })
  const GuardedBuffer<std::int8_t> guarded(arranged);
  args.arranged = guarded.data();
  const GuardedBuffer<float> scratch(
      std::vector<float>(panel_scratch_floats(args.depth_blocks), std::numeric_limits<float>::quiet_NaN()));
  args.scratch = scratch.data();
  function(args, begin, end);
}

void check_problem(BlockGemmFunction* function, const Problem& problem, bool has_bias, bool has_residual) {
  const std::vector<float> expected = problem.expected(has_bias, has_residual);
  GuardedBuffer<float> out(expected.size());
  const BlockGemmArgs args = problem.args(out.data(), has_bias, has_residual);
  run(function, args, 0, problem.blocks);
  check_same(out.data(), expected.data(), expected.size(), describe(problem.shape));

  std::fill_n(out.data(), out.size(), std::numeric_limits<float>::quiet_NaN());
  for (std::size_t block = problem.blocks; block-- > 0;) run(function, args, block, block + 1);
  check_same(out.data(), expected.data(), expected.size(), describe(problem.shape) + ", block by block");
}

// Tests rows, depths and columns at the edges of all kernels' tiles.
void test_shapes(BlockGemmFunction* function) {
  for (const std::size_t rows : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 31u, 32u, 33u}) {
    for (const std::size_t depth_blocks : {1u, 2u, 3u, 5u, 18u, 48u}) {
      for (const std::size_t columns : {1u, 3u, 7u, 8u, 9u, 15u, 16u, 17u, 31u, 33u, 48u, 49u, 97u}) {
        check_problem(function, Problem({rows, depth_blocks, columns}), rows % 2 == 0, columns % 3 == 0);
      }
    }
  }
}

// Tests depths for which a panel of tiles has fewer column blocks, down to one.
void test_deep(BlockGemmFunction* function) {
  for (const std::size_t rows : {3u, 9u, 33u}) {
    for (const std::size_t depth_blocks : {204u, 205u, 300u, 820u}) {
      check_problem(function, Problem({rows, depth_blocks, 81}), true, rows == 9);
    }
  }
}

void test_epilogues(BlockGemmFunction* function) {
  for (const std::size_t rows : {1u, 5u, 9u, 33u}) {
    const Problem problem({rows, 3, 61});
    for (const bool has_bias : {false, true}) {
      for (const bool has_residual : {false, true}) check_problem(function, problem, has_bias, has_residual);
    }
  }
}

// The residual may be the output itself; memory between its rows does not change.
void test_residual_in_place(BlockGemmFunction* function) {
  for (const std::size_t rows : {1u, 2u, 7u, 33u}) {
    const Problem problem({rows, 3, 29});
    const std::vector<float> expected = problem.expected(true, true);
    const GuardedBuffer<float> out(problem.residual.copy());
    BlockGemmArgs args = problem.args(out.data(), true, false);
    args.residual = out.data();
    args.out_stride = args.residual_stride;
    run(function, args, 0, problem.blocks);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::string what = describe(problem.shape) + ", row " + std::to_string(row);
      const std::size_t end = row * args.out_stride + args.columns;
      check_same(out.data() + row * args.out_stride, expected.data() + row * args.columns, args.columns,
                 what);
      check_same(out.data() + end, problem.residual.data() + end, 1, what + ", past its end");
    }
  }
}

// Tests combinations of the largest and smallest factors, for which 16-bit partial sums would saturate or
// wrap.
void test_extremes(BlockGemmFunction* function) {
  for (const int left : {-127, 127}) {
    for (const int q : {0, 15}) {
      for (const std::size_t rows : {1u, 3u, 33u}) {
        const Shape shape = {rows, 18, 49};
        Operands operands(shape);
        std::fill(operands.left.begin(), operands.left.end(), static_cast<std::int8_t>(left));
        std::fill(operands.q.begin(), operands.q.end(), static_cast<std::uint8_t>(q));
        check_problem(function, Problem(shape, operands), false, false);
      }
    }
  }
}

void test_mixed_extremes(BlockGemmFunction* function) {
  for (const std::size_t rows : {1u, 7u, 33u}) {
    Operands operands({rows, 18, 49});
    for (std::int8_t& value : operands.left) value = value < 0 ? -127 : 127;
    for (std::uint8_t& value : operands.q) value = value < 8 ? 0 : 15;
    check_problem(function, Problem({rows, 18, 49}, operands), true, true);
  }
}

// Tests scales and minima at the ends of the float16 range, with either sign: 0, subnormal and finite.
void test_scales(BlockGemmFunction* function) {
  for (const std::size_t rows : {5u, 9u}) {
    for (const int magnitude : {0x0000, 0x0001, 0x03ff, 0x0400, 0x3c00, 0x7bff}) {
      for (const int sign : {0x0000, 0x8000}) {
        const Shape shape = {rows, 3, 49};
        Operands operands(shape);
        std::fill(operands.scales.begin(), operands.scales.end(), static_cast<std::uint16_t>(magnitude));
        std::fill(operands.minima.begin(), operands.minima.end(),
                  static_cast<std::uint16_t>(magnitude | sign));
        check_problem(function, Problem(shape, operands), false, false);
        std::swap(operands.scales, operands.minima);
        check_problem(function, Problem(shape, operands), false, false);
      }
    }
  }
}

// Tests splits of the blocks and of the rows. Canaries around the matrix and in the columns of other blocks
// must not change.
void test_splits(BlockGemmFunction* function) {
  constexpr std::size_t kGuards = 64;
  constexpr float kCanary = 1e30f;
  const Problem problem({33, 5, 150});
  const std::size_t rows = problem.shape.rows, columns = problem.shape.columns;
  const std::vector<float> expected = problem.expected(true, true);
  for (const auto& [begin, end] :
       std::vector<std::pair<std::size_t, std::size_t>>{{0, 1}, {1, 4}, {4, 9}, {9, 10}, {3, 3}, {0, 10}}) {
    for (const std::size_t rows_at_once : {33u, 10u}) {
      const GuardedBuffer<float> out(std::vector<float>(kGuards + rows * columns, kCanary));
      for (std::size_t row = 0; row < rows; row += rows_at_once) {
        BlockGemmArgs args = problem.args(out.data() + kGuards + row * columns, true, true);
        args.left += row * problem.shape.depth();
        args.left_scales += row;
        args.left_sums += row * problem.shape.depth_blocks;
        args.residual += row * args.residual_stride;
        args.rows = std::min(rows_at_once, rows - row);
        run(function, args, begin, end);
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
void test_rows_alone(BlockGemmFunction* function) {
  const Problem problem({33, 5, 49});
  const std::vector<float> expected = problem.expected(true, false);
  std::vector<float> out(expected.size());
  for (std::size_t row = 0; row < problem.shape.rows; ++row) {
    BlockGemmArgs args = problem.args(out.data() + row * problem.shape.columns, true, false);
    args.left += row * problem.shape.depth();
    args.left_scales += row;
    args.left_sums += row * problem.shape.depth_blocks;
    args.rows = 1;
    run(function, args, 0, problem.blocks);
  }
  check_same(out.data(), expected.data(), expected.size(), "row by row");
}

}  // namespace

void test_block_gemm(Suite& suite) {
  const auto run = [&](const char* name, void (*test)(BlockGemmFunction*)) {
    suite.run_rows(block_gemm_f32_s8row_u4block, name, test);
    suite.run(std::string("block_gemm by the twin of tiles: ") + name,
              [=] { test(block_gemm_by_tile_twin); });
#if defined(__linux__) && defined(__x86_64__)
    suite.run(std::string("block_gemm by tile instructions: ") + name,
              [=] { test(block_gemm_by_tile_instructions); });
#endif
  };
  run("exact at tile edges", test_shapes);
  run("exact where deep", test_deep);
  run("bias and residual", test_epilogues);
  run("residual in place", test_residual_in_place);
  run("ends of int8 and of 4 bits", test_extremes);
  run("ends of int8 and of 4 bits mixed", test_mixed_extremes);
  run("ends of float16", test_scales);
  run("any split, without stray writes", test_splits);
  run("rows alone", test_rows_alone);
}

}  // namespace chunkrt::testing
