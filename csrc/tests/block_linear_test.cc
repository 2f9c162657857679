// Compares a program's linears with 4-bit blocks with the formulas of quantize.h and block_gemm.h, bit for
// bit.
#include <algorithm>
#include <cmath>
#include <vector>

#include "program/operators/operators.h"
#include "tests/half.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

// A weight in 4-bit blocks: q, scales and minima in block_gemm.h's formula and in the memory layout.
struct BlockWeight {
  BlockWeight(std::size_t depth, std::size_t columns, Random& random)
      : q(depth * columns),
        scales(depth / 32 * columns),
        minima(scales.size()),
        packed((columns + 15) / 16 * depth * 8),
        packed_scales((columns + 15) / 16 * depth) {
    const std::size_t depth_blocks = depth / 32;
    const std::vector<std::int8_t> bits = random.int8s(q.size());
    for (std::size_t k = 0; k < depth; ++k) {
      for (std::size_t n = 0; n < columns; ++n) {
        const std::size_t block = n / 16 * depth_blocks + k / 32;
        std::uint8_t& byte = packed[((block * 4 + k % 32 / 8) * 16 + n % 16) * 4 + k % 4];
        const int value = bits[k * columns + n] & 15;
        q[k * columns + n] = value;
        byte = static_cast<std::uint8_t>(byte | (k % 8 < 4 ? value : value << 4));
        if (k % 32 != 0) continue;
        // A scale from 2^-10 to 2^-8, and the minimum -8 * scale.
        const int scale = 0x1400 + (bits[k * columns + n] & 127) * 16, minimum = (scale + 0x0c00) | 0x8000;
        packed_scales[block * 32 + n % 16] = static_cast<std::uint16_t>(scale);
        packed_scales[block * 32 + 16 + n % 16] = static_cast<std::uint16_t>(minimum);
        scales[k / 32 * columns + n] = static_cast<float>(half_value(packed_scales[block * 32 + n % 16]));
        minima[k / 32 * columns + n] = -8.0f * scales[k / 32 * columns + n];
      }
    }
  }

  std::vector<int> q;                 // [depth, columns]
  std::vector<float> scales, minima;  // [depth / 32, columns]
  std::vector<std::uint8_t> packed;
  std::vector<std::uint16_t> packed_scales;
};

// The product of one row: its outliers are multiplied in float, and the rest in int8.
void multiply(std::vector<float> row, const BlockWeight& weight, const float* bias, const float* residual,
              float* out) {
  const std::size_t depth = row.size(), columns = weight.q.size() / depth;
  float sums[64] = {};
  for (std::size_t k = 0; k < depth; ++k) sums[k % 64] += std::fabs(row[k]);
  for (std::size_t half = 32; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  const float limit = 8.0f * sums[0] / static_cast<float>(depth);
  const std::vector<float> whole = row;
  for (float& x : row) x = std::fabs(x) > limit ? 0.0f : x;
  float largest = 0.0f;
  for (const float x : row) largest = std::max(largest, std::fabs(x));
  const float inverse = 127.0f / largest, scale = largest / 127.0f;
  std::vector<int> digit(depth);
  for (std::size_t k = 0; k < depth; ++k) digit[k] = static_cast<int>(std::nearbyint(row[k] * inverse));
  for (std::size_t n = 0; n < columns; ++n) {
    float value = 0.0f;
    for (std::size_t b = 0; b < depth / 32; ++b) {
      int sum = 0, left_sum = 0;
      for (std::size_t k = b * 32; k < b * 32 + 32; ++k) {
        sum += digit[k] * weight.q[k * columns + n];
        left_sum += digit[k];
      }
      value = std::fma(static_cast<float>(sum), weight.scales[b * columns + n], value);
      value = std::fma(static_cast<float>(left_sum), weight.minima[b * columns + n], value);
    }
    value *= scale;
    if (bias != nullptr) value += bias[n];
    if (residual != nullptr) value += residual[n];
    float taken = 0.0f;
    for (std::size_t k = 0; k < depth; ++k) {
      if (!(std::fabs(whole[k]) > limit)) continue;
      const std::size_t place = k / 32 * columns + n;
      const float q = static_cast<float>(weight.q[k * columns + n]);
      taken = std::fma(whole[k], std::fma(q, weight.scales[place], weight.minima[place]), taken);
    }
    out[n] = value + taken;
  }
}

// Two linears in blocks with a common input; one of them has a bias and a residual. Every third row has
// outliers.
void test_two_linears() {
  for (const std::size_t depth : {32u, 64u, 160u, 576u}) {
    for (const std::size_t columns : {1u, 15u, 16u, 17u, 49u, 130u}) {
      const std::size_t rows = columns % 9 + 1, blocks = (columns + 15) / 16;
      const std::string what = std::to_string(depth) + " x " + std::to_string(columns);
      Random random(static_cast<std::uint32_t>(depth + columns));
      BlockWeight weight(depth, columns, random);
      std::vector<float> x = random.floats(rows * depth, 2.0f),
                         residual = random.floats(rows * columns, 1.0f);
      for (std::size_t m = 0; m < rows; m += 3) {
        for (std::size_t k = m; k < depth; k += 29) x[m * depth + k] *= 100.0f;
      }
      const std::vector<float> bias = random.floats(columns, 1.0f);

      ProgramBuilder builder(std::make_shared<ThreadPool>(2), rows);
      const ValueId input = builder.input("x", Dtype::float32, {rows_dimension(Symbol::T), fixed(depth)});
      const ValueId added =
          builder.input("residual", Dtype::float32, {rows_dimension(Symbol::T), fixed(columns)});
      const ValueId packed =
          builder.constant(weight.packed.data(), Dtype::uint8, {blocks, depth / 32, 4, 16, 4}, nullptr);
      const ValueId scales =
          builder.constant(weight.packed_scales.data(), Dtype::float16, {blocks, depth / 32, 2, 16}, nullptr);
      const ValueId biases = builder.constant(bias.data(), Dtype::float32, {columns}, nullptr);
      builder.output("one", block_linear(builder, input, packed, scales, columns, {}, {}));
      builder.output("two", block_linear(builder, input, packed, scales, columns, biases, added));
      std::vector<float> one(rows * columns), two(rows * columns);
      const TensorView inputs[] = {{x.data(), "float32", {rows, depth}, true, false},
                                   {residual.data(), "float32", {rows, columns}, true, false}};
      const TensorView outputs[] = {{one.data(), "float32", {rows, columns}, true, true},
                                    {two.data(), "float32", {rows, columns}, true, true}};
      builder.build()->run(inputs, outputs);

      std::vector<float> expected_one(rows * columns), expected_two(rows * columns);
      for (std::size_t m = 0; m < rows; ++m) {
        const auto begin = x.begin() + static_cast<std::ptrdiff_t>(m * depth);
        const std::vector<float> row(begin, begin + static_cast<std::ptrdiff_t>(depth));
        multiply(row, weight, nullptr, nullptr, expected_one.data() + m * columns);
        multiply(row, weight, bias.data(), residual.data() + m * columns, expected_two.data() + m * columns);
      }
      check_same(one.data(), expected_one.data(), one.size(), what + ", alone");
      check_same(two.data(), expected_two.data(), two.size(), what + ", with a bias and a residual");
    }
  }
}

}  // namespace

void test_block_linear(Suite& suite) { suite.run("program: linears with 4-bit blocks", test_two_linears); }

}  // namespace chunkrt::testing
