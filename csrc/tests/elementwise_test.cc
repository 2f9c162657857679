// Compares elementwise with exact arithmetic or double precision, and bit for bit with the reference.
#include <algorithm>
#include <limits>
#include <numbers>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/half.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kCounts[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 576, 577};

std::vector<float> apply(BinaryFunction* function, const std::vector<float>& left,
                         const std::vector<float>& right) {
  const GuardedBuffer<float> guarded_left(left), guarded_right(right), out(left.size());
  function(guarded_left.data(), guarded_right.data(), out.data(), out.size());
  const std::vector<float> result = out.copy();
  function(guarded_left.data(), guarded_right.data(), guarded_left.data(), out.size());
  check_same(guarded_left.data(), result.data(), result.size(), "in place");
  return result;
}

std::vector<float> apply(UnaryFunction* function, const std::vector<float>& input) {
  const GuardedBuffer<float> guarded_input(input), out(input.size());
  function(guarded_input.data(), out.data(), out.size());
  const std::vector<float> result = out.copy();
  function(guarded_input.data(), guarded_input.data(), out.size());
  check_same(guarded_input.data(), result.data(), result.size(), "in place");
  return result;
}

template <double (*Truth)(double, double)>
void test_exact(BinaryFunction* function) {
  for (const std::size_t count : kCounts) {
    const std::vector<float> left = Random(1).floats(count, 3.0f), right = Random(2).floats(count, 5.0f);
    const std::vector<float> found = apply(function, left, right);
    std::vector<float> expected(count);
    for (std::size_t i = 0; i < count; ++i) {
      // Sum and product of two such floats are exact in double, so this rounds once.
      expected[i] = static_cast<float>(Truth(static_cast<double>(left[i]), static_cast<double>(right[i])));
    }
    check_same(found.data(), expected.data(), count, std::to_string(count) + " elements");
  }
}

double sum(double left, double right) { return left + right; }
double product(double left, double right) { return left * right; }

// A grid over all relevant magnitudes, with ends beyond the clamping limits of exp, and special values.
std::vector<float> unary_inputs() {
  std::vector<float> inputs;
  for (int i = -120000; i <= 120000; ++i) inputs.push_back(static_cast<float>(i) * 0.001f);
  for (const float special : {0.0f, 1e-40f, 1e30f, std::numeric_limits<float>::infinity()}) {
    inputs.insert(inputs.end(), {special, -special});
  }
  inputs.push_back(std::numeric_limits<float>::quiet_NaN());
  return inputs;
}

// A function of one argument, with its exact value and the tolerance of float32.
struct Truth {
  const char* name;
  double (*value)(double);
  double (*tolerance)(double x, double expected);
  UnaryFunction* reference;
};

double unit_of(double value) {
  return std::ldexp(1.0, std::ilogb(std::max(0x1p-126, std::fabs(value))) - 23);
}

constexpr double kLimit = static_cast<double>(kExpLimit);

constexpr Truth kSigmoid = {
    "sigmoid", [](double x) { return 1.0 / (1.0 + std::exp(-x)); },
    [](double x, double expected) { return x > -kLimit ? 2.5 * unit_of(expected) : 0x1p-125; },
    sigmoid_f32_f32_reference};

constexpr Truth kExp = {"exp", [](double x) { return x < -kLimit ? 0.0 : std::exp(std::min(x, kLimit)); },
                        [](double, double expected) { return 1.1 * unit_of(expected); },
                        exp_f32_f32_reference};

// The argument of the sigmoid has the error of 5 roundings, and the relative error of its exponential is the
// same amount.
constexpr Truth kGelu = {
    "gelu",
    [](double x) {
      return std::isinf(x) ? std::max(x, 0.0)
                           : x / (1.0 + std::exp(-2.0 * std::sqrt(2.0 / std::numbers::pi) *
                                                 (x + 0.044715 * x * x * x)));
    },
    [](double x, double expected) {
      const double argument = -2.0 * std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      return (8.0 + 5.0 * std::clamp(argument, 0.0, kLimit)) * 0x1p-24 * std::fabs(expected) +
             0x1p-125 * std::fabs(x);
    },
    gelu_f32_f32_reference};

constexpr Truth kErfGelu = {
    "erf_gelu", [](double x) { return x == -INFINITY ? 0.0 : 0.5 * x * std::erfc(-x / std::numbers::sqrt2); },
    [](double x, double expected) {
      return (20.0 + 4.0 * x * x) * 0x1p-24 * std::fabs(expected) +
             (x < -12.0 ? 1e-35 : 0x1p-125 * std::fabs(x));
    },
    erf_gelu_f32_f32_reference};

constexpr double kQuick = static_cast<double>(kQuickGelu);

constexpr Truth kQuickGeluTruth = {
    "quick_gelu",
    [](double x) { return std::isinf(x) ? std::max(x, 0.0) : x / (1.0 + std::exp(-kQuick * x)); },
    [](double x, double expected) {
      return (6.0 + 2.0 * std::clamp(-kQuick * x, 0.0, kLimit)) * 0x1p-24 * std::fabs(expected) +
             0x1p-125 * std::fabs(x);
    },
    quick_gelu_f32_f32_reference};

constexpr Truth kRelu = {"relu", [](double x) { return std::max(x, 0.0); },
                         [](double, double) { return 0.0; }, relu_f32_f32_reference};

constexpr Truth kSoftplus = {
    "softplus", [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); },
    [](double x, double expected) { return x > -kLimit ? 4.0 * unit_of(expected) : 0x1p-125; },
    softplus_f32_f32_reference};

constexpr Truth kTanh = {"tanh", [](double x) { return std::tanh(x); },
                         [](double, double expected) { return 2.5 * unit_of(expected); },
                         tanh_f32_f32_reference};

template <const Truth& Function>
void test_unary(UnaryFunction* function) {
  const std::vector<float> inputs = unary_inputs();
  const std::vector<float> found = apply(function, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const double x = static_cast<double>(inputs[i]), y = static_cast<double>(found[i]);
    const double expected = Function.value(x);
    check(std::isnan(x) ? std::isnan(y)
                        : y == expected || std::fabs(y - expected) <= Function.tolerance(x, expected),
          [&] {
            return std::string(Function.name) + "(" + std::to_string(x) + ") is " + std::to_string(found[i]);
          });
  }
  std::vector<float> expected(inputs.size());
  Function.reference(inputs.data(), expected.data(), expected.size());
  check_same(found.data(), expected.data(), expected.size(), "against the reference");
  for (const std::size_t count : kCounts) {
    const std::vector<float> input = Random(3).floats(count, 9.0f), some = apply(function, input);
    std::vector<float> reference(count);
    Function.reference(input.data(), reference.data(), count);
    check_same(some.data(), reference.data(), count, std::to_string(count) + " elements");
  }
}

void test_sigmoid_ends(UnaryFunction* function) {
  const std::vector<float> inputs = unary_inputs(), found = apply(function, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check(!(found[i] < 0.0f || found[i] > 1.0f),
          [&] { return "sigmoid(" + std::to_string(inputs[i]) + ") is not in 0..1"; });
    check(!(inputs[i] >= 100.0f) || found[i] == 1.0f,
          [&] { return "sigmoid(" + std::to_string(inputs[i]) + ") is not 1"; });
  }
}

void test_gelu_mul(BinaryFunction* function) {
  for (const std::size_t count : kCounts) {
    const std::vector<float> gate = Random(4).floats(count, 9.0f), up = Random(5).floats(count, 3.0f);
    const std::vector<float> found = apply(function, gate, up);
    std::vector<float> expected(count);
    gelu_f32_f32_reference(gate.data(), expected.data(), count);
    mul_f32_f32_f32_reference(expected.data(), up.data(), expected.data(), count);
    check_same(found.data(), expected.data(), count, std::to_string(count) + " elements");
  }
}

void test_silu_mul(BinaryFunction* function) {
  for (const std::size_t count : kCounts) {
    const std::vector<float> gate = Random(4).floats(count, 9.0f), up = Random(5).floats(count, 3.0f);
    const std::vector<float> found = apply(function, gate, up);
    std::vector<float> parts(count);
    sigmoid_f32_f32_reference(gate.data(), parts.data(), count);
    for (std::size_t i = 0; i < count; ++i) parts[i] = (gate[i] * parts[i]) * up[i];
    check_same(found.data(), parts.data(), count, std::to_string(count) + " elements");
    for (std::size_t i = 0; i < count; ++i) {
      const double g = static_cast<double>(gate[i]);
      const double expected = g / (1.0 + std::exp(-g)) * static_cast<double>(up[i]);
      // The sigmoid's 2.5 units, at most 5 half units, and two products.
      check(std::fabs(static_cast<double>(found[i]) - expected) <= 7.0 * 0x1p-24 * std::fabs(expected), [&] {
        return "silu(" + std::to_string(g) + ") * " + std::to_string(up[i]) + " is " +
               std::to_string(found[i]);
      });
    }
  }
}

// Gates and ups on both sides of the limit, and NaNs.
void test_clamped_swiglu(ClampedSwigluFunction* function) {
  constexpr float kAlpha = 1.702f, kLimit = 7.0f;
  for (const std::size_t count : kCounts) {
    const GuardedBuffer<float> gate(Random(4).floats(count, 20.0f)), up(Random(5).floats(count, 20.0f));
    const GuardedBuffer<float> found(count);
    function(gate.data(), up.data(), kAlpha, kLimit, found.data(), count);
    for (std::size_t i = 0; i < count; ++i) {
      const double g = std::min(static_cast<double>(gate[i]), 7.0);
      const double u = std::clamp(static_cast<double>(up[i]), -7.0, 7.0);
      const double angle = static_cast<double>(kAlpha) * g;
      const double expected = (u + 1.0) * g / (1.0 + std::exp(-angle));
      // The sigmoid's 2.5 units, the rounding of its argument, a sum and two products.
      const double bound = (8.0 + std::fabs(angle)) * 0x1p-24 * std::fabs(expected) + 0x1p-120;
      check(std::fabs(static_cast<double>(found[i]) - expected) <= bound,
            [&] { return "gate " + std::to_string(g) + ", up " + std::to_string(u); });
    }
    std::vector<float> reference(count);
    clamped_swiglu_f32_f32_f32_reference(gate.data(), up.data(), kAlpha, kLimit, reference.data(), count);
    check_same(found.data(), reference.data(), count, std::to_string(count) + " elements");
  }
  const float nan = std::numeric_limits<float>::quiet_NaN(), values[2][2] = {{nan, 1.0f}, {1.0f, nan}};
  float found[2];
  function(values[0], values[1], kAlpha, kLimit, found, 2);
  check(std::isnan(found[0]) && std::isnan(found[1]), [] { return std::string("a NaN is lost"); });
}

// The sum cancels between positive and negative parts, so that the tolerance is relative to the parts.
void test_xielu(XieluFunction* function) {
  const std::vector<float> parameters = {0.8f, 1.3f, 0.5f, -1e-6f};
  std::vector<float> inputs;
  for (int i = -20000; i <= 20000; ++i) inputs.push_back(static_cast<float>(i) * 0.003f);
  for (const float tiny : {0.0f, 1e-40f, 1e-7f, 1e-6f, 1e-5f, 1e-3f})
    inputs.insert(inputs.end(), {tiny, -tiny});
  const GuardedBuffer<float> given(inputs), found(inputs.size());
  function(given.data(), parameters.data(), found.data(), found.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const double x = static_cast<double>(inputs[i]), beta = 0.5, eps = static_cast<double>(parameters[3]);
    const double positive = static_cast<double>(parameters[0]) * x * x;
    const double negative = static_cast<double>(parameters[1]) * (std::expm1(std::min(x, eps)) - x);
    const double curved = x > 0.0 ? positive : negative, expected = curved + beta * x;
    const double bound = 8.0 * 0x1p-24 * (std::fabs(curved) + std::fabs(x)) + 1e-13;
    check(std::fabs(static_cast<double>(found[i]) - expected) <= bound,
          [&] { return "xielu(" + std::to_string(x) + ") is " + std::to_string(found[i]); });
  }
  std::vector<float> reference(inputs.size());
  xielu_f32_f32_reference(inputs.data(), parameters.data(), reference.data(), inputs.size());
  check_same(found.data(), reference.data(), inputs.size(), "against the reference");
  for (const std::size_t count : kCounts) {
    const GuardedBuffer<float> some(Random(3).floats(count, 9.0f)), out(count);
    function(some.data(), parameters.data(), out.data(), count);
    std::vector<float> expected(count);
    xielu_f32_f32_reference(some.data(), parameters.data(), expected.data(), count);
    check_same(out.data(), expected.data(), count, std::to_string(count) + " elements");
  }
}

void test_thresholded_relu(ThresholdFunction* function) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const std::size_t count : kCounts) {
    std::vector<float> input = Random(3).floats(count, 2.0f);
    const float specials[] = {0.25f, std::nextafter(0.25f, 1.0f), std::nextafter(0.25f, 0.0f), infinity,
                              -infinity};
    for (std::size_t i = 0; i < std::min(count, std::size(specials)); ++i) input[i] = specials[i];
    const GuardedBuffer<float> given(input), found(count);
    function(given.data(), std::nextafter(0.25f, 1.0f), found.data(), count);
    for (std::size_t i = 0; i < count; ++i) {
      check(found[i] == (input[i] > 0.25f ? input[i] : 0.0f),
            [&] { return std::to_string(input[i]) + " becomes " + std::to_string(found[i]); });
    }
  }
  float found = 0.0f;
  function(&nan, 0.25f, &found, 1);
  check(std::isnan(found), [] { return std::string("a NaN is lost"); });
}

void test_every_half(WidenFunction* function) {
  const GuardedBuffer<std::uint16_t> halves(0x10000);
  const GuardedBuffer<float> found(0x10000);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  function(halves.data(), found.data(), found.size());
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const double expected = half_value(halves[i]), value = static_cast<double>(found[i]);
    check(std::isnan(expected) ? std::isnan(value)
                               : value == expected && std::signbit(value) == std::signbit(expected),
          [&] { return "half " + std::to_string(i) + " is " + std::to_string(value); });
  }
}

void test_widen_counts(WidenFunction* function) {
  for (const std::size_t count : kCounts) {
    const GuardedBuffer<std::uint16_t> halves(count);
    const GuardedBuffer<float> found(count);
    for (std::size_t i = 0; i < count; ++i) halves[i] = static_cast<std::uint16_t>(0x3c00 + i);
    function(halves.data(), found.data(), count);
    for (std::size_t i = 0; i < count; ++i) {
      check(static_cast<double>(found[i]) == half_value(halves[i]),
            [&] { return std::to_string(count) + " elements"; });
    }
  }
}

}  // namespace

void test_elementwise(Suite& suite) {
  suite.run_rows(add_f32_f32_f32, "the rounded sum", test_exact<sum>);
  suite.run_rows(mul_f32_f32_f32, "the rounded product", test_exact<product>);
  constexpr const char* kUnary = "double precision and bits of the reference, any count";
  suite.run_rows(sigmoid_f32_f32, kUnary, test_unary<kSigmoid>);
  suite.run_rows(sigmoid_f32_f32, "from 0 to 1", test_sigmoid_ends);
  suite.run_rows(exp_f32_f32, kUnary, test_unary<kExp>);
  suite.run_rows(gelu_f32_f32, kUnary, test_unary<kGelu>);
  suite.run_rows(erf_gelu_f32_f32, kUnary, test_unary<kErfGelu>);
  suite.run_rows(quick_gelu_f32_f32, kUnary, test_unary<kQuickGeluTruth>);
  suite.run_rows(xielu_f32_f32, kUnary, test_xielu);
  suite.run_rows(relu_f32_f32, kUnary, test_unary<kRelu>);
  suite.run_rows(thresholded_relu_f32_f32, "the definition, any count", test_thresholded_relu);
  suite.run_rows(softplus_f32_f32, kUnary, test_unary<kSoftplus>);
  suite.run_rows(tanh_f32_f32, kUnary, test_unary<kTanh>);
  suite.run_rows(gelu_mul_f32_f32_f32, "bits of gelu and a product", test_gelu_mul);
  suite.run_rows(silu_mul_f32_f32_f32, "double precision and bits of its parts", test_silu_mul);
  suite.run_rows(clamped_swiglu_f32_f32_f32, "double precision and bits of the reference",
                 test_clamped_swiglu);
  suite.run_rows(widen_f32_f16, "every float16", test_every_half);
  suite.run_rows(widen_f32_f16, "any count", test_widen_counts);
}

}  // namespace chunkrt::testing
