// Compares norm with double precision, and bit for bit with the reference.
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr float kEpsilon = 1e-5f;

std::vector<float> norm(RmsNormFunction* function, const std::vector<float>& input,
                        const std::vector<float>& weight, bool in_place = false) {
  const std::size_t rows = input.size() / weight.size();
  const GuardedBuffer<float> guarded_input(input), guarded_weight(weight), separate_out(input.size());
  float* const out = in_place ? guarded_input.data() : separate_out.data();
  const RmsNormArgs args = {.input = guarded_input.data(),
                            .weight = guarded_weight.data(),
                            .out = out,
                            .width = weight.size(),
                            .epsilon = kEpsilon};
  for (std::size_t row = rows; row-- > 0;) function(args, row, row + 1);
  return {out, out + input.size()};
}

void test_truth(RmsNormFunction* function) {
  constexpr std::size_t kRows = 2;
  for (const std::size_t width : {1u, 3u, 4u, 15u, 16u, 17u, 31u, 33u, 100u, 576u, 577u}) {
    const std::vector<float> input = Random(1).floats(kRows * width, 5.0f);
    const std::vector<float> weight = Random(2).floats(width, 2.0f);
    const std::vector<float> found = norm(function, input, weight);
    // The square root halves the error of the sum that norm.h states; then mean, epsilon, root, inverse and
    // two products round.
    const double relative_error = ((static_cast<double>(width) / 16.0 + 6.0) / 2.0 + 6.0) * 0x1p-24;
    for (std::size_t row = 0; row < kRows; ++row) {
      double sum = 0.0;
      for (std::size_t i = 0; i < width; ++i) sum += std::pow(static_cast<double>(input[row * width + i]), 2);
      const double inverse =
          1.0 / std::sqrt(sum / static_cast<double>(width) + static_cast<double>(kEpsilon));
      for (std::size_t i = 0; i < width; ++i) {
        const double expected =
            static_cast<double>(input[row * width + i]) * inverse * static_cast<double>(weight[i]);
        const double error = std::fabs(static_cast<double>(found[row * width + i]) - expected);
        check(error <= std::fabs(expected) * relative_error, [&] {
          return "width " + std::to_string(width) + ", column " + std::to_string(i) + " is off by " +
                 std::to_string(error / std::fabs(expected) * 0x1p24) + " units";
        });
      }
    }
  }
}

void test_bits(RmsNormFunction* function) {
  for (std::size_t width = 1; width <= 70; ++width) {
    std::vector<float> input = Random(3).floats(4 * width, 5.0f);
    std::fill_n(input.begin(), width, 0.0f);
    input[width] = std::numeric_limits<float>::quiet_NaN();
    input[3 * width - 1] = std::numeric_limits<float>::infinity();
    const std::vector<float> weight = Random(4).floats(width, 2.0f);
    const std::vector<float> expected = norm(rms_norm_f32_f32_reference, input, weight);
    const std::string where = "width " + std::to_string(width);
    check_same(norm(function, input, weight).data(), expected.data(), expected.size(), where);
    check_same(norm(function, input, weight, true).data(), expected.data(), expected.size(),
               where + ", in place");
  }
}

std::vector<float> layer_norm(LayerNormFunction* function, const std::vector<float>& input,
                              const std::vector<float>& weight, const std::vector<float>& bias,
                              bool in_place = false) {
  const GuardedBuffer<float> guarded_input(input), guarded_weight(weight), guarded_bias(bias),
      separate_out(input.size());
  float* const out = in_place ? guarded_input.data() : separate_out.data();
  const LayerNormArgs args = {.input = guarded_input.data(),
                              .weight = guarded_weight.data(),
                              .bias = guarded_bias.data(),
                              .out = out,
                              .width = weight.size(),
                              .epsilon = kEpsilon};
  for (std::size_t row = input.size() / weight.size(); row-- > 0;) function(args, row, row + 1);
  return {out, out + input.size()};
}

void test_layer_norm_truth(LayerNormFunction* function) {
  constexpr std::size_t kRows = 2;
  for (const std::size_t width : {2u, 3u, 4u, 15u, 16u, 17u, 31u, 33u, 100u, 576u, 577u}) {
    std::vector<float> input = Random(1).floats(kRows * width, 5.0f);
    for (float& x : input) x += 2.0f;
    const std::vector<float> weight = Random(2).floats(width, 2.0f), bias = Random(5).floats(width, 1.0f);
    const std::vector<float> found = layer_norm(function, input, weight, bias);
    for (std::size_t row = 0; row < kRows; ++row) {
      double mean = 0.0, variance = 0.0, largest = 0.0;
      for (std::size_t i = 0; i < width; ++i) mean += static_cast<double>(input[row * width + i]);
      mean /= static_cast<double>(width);
      for (std::size_t i = 0; i < width; ++i) {
        const double d = static_cast<double>(input[row * width + i]) - mean;
        variance += d * d / static_cast<double>(width);
        largest = std::max(largest, std::fabs(static_cast<double>(input[row * width + i])));
      }
      const double inverse = 1.0 / std::sqrt(variance + static_cast<double>(kEpsilon));
      // The mean has the error of its sum, relative to the largest value; the rest is that of rms_norm.
      const double units = static_cast<double>(width) / 16.0 + 12.0;
      for (std::size_t i = 0; i < width; ++i) {
        const double w = static_cast<double>(weight[i]), b = static_cast<double>(bias[i]);
        const double expected = (static_cast<double>(input[row * width + i]) - mean) * inverse * w + b;
        const double scale = 2.0 * largest * inverse * std::fabs(w) + std::fabs(b);
        check(std::fabs(static_cast<double>(found[row * width + i]) - expected) <= units * 0x1p-24 * scale,
              [&] { return "width " + std::to_string(width) + ", column " + std::to_string(i); });
      }
    }
  }
}

void test_layer_norm_bits(LayerNormFunction* function) {
  for (std::size_t width = 1; width <= 70; ++width) {
    std::vector<float> input = Random(3).floats(4 * width, 5.0f);
    std::fill_n(input.begin(), width, 0.0f);
    const std::vector<float> weight = Random(4).floats(width, 2.0f), bias = Random(6).floats(width, 1.0f);
    const std::vector<float> expected = layer_norm(layer_norm_f32_f32_reference, input, weight, bias);
    const std::string where = "width " + std::to_string(width);
    check_same(layer_norm(function, input, weight, bias).data(), expected.data(), expected.size(), where);
    check_same(layer_norm(function, input, weight, bias, true).data(), expected.data(), expected.size(),
               where + ", in place");
  }
}

}  // namespace

void test_norm(Suite& suite) {
  suite.run_rows(rms_norm_f32_f32, "double precision", test_truth);
  suite.run_rows(rms_norm_f32_f32, "bits of the reference", test_bits);
  suite.run_rows(layer_norm_f32_f32, "double precision", test_layer_norm_truth);
  suite.run_rows(layer_norm_f32_f32, "bits of the reference", test_layer_norm_bits);
}

}  // namespace chunkrt::testing
