// Compares linear_attention with double precision, and its step form, chunk form and splits with each other.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kRowCounts[] = {1, 2, 3, 31, 32, 33, 64, 95};

struct Heads {
  std::size_t num_k_heads, num_v_heads, k_dim, v_dim;

  std::size_t width() const { return 2 * num_k_heads * k_dim + num_v_heads * v_dim; }
  std::string text() const {
    return std::to_string(num_v_heads) + " heads of " + std::to_string(k_dim) + " x " + std::to_string(v_dim);
  }
};

constexpr Heads kHeads[] = {{1, 1, 1, 1}, {1, 3, 7, 5}, {2, 4, 24, 80}, {2, 2, 64, 64}, {1, 2, 33, 130}};

// Realistic rows of a layer: k has length 1, decays and betas are in 0 .. 1, and some rows are zeros.
struct Problem {
  Problem(const Heads& shape, std::size_t num_rows) : heads(shape), rows(num_rows) {
    Random random(static_cast<std::uint32_t>(rows * 131 + shape.v_dim));
    qkv = random.floats(rows * heads.width(), 1.0f);
    decay = random.floats(rows * heads.num_v_heads, 1.0f);
    beta = random.floats(rows * heads.num_v_heads, 1.0f);
    state = random.floats(heads.num_v_heads * heads.k_dim * heads.v_dim, 1.0f);
    for (float& value : decay) value = value < -0.9f ? 0.0f : value > 0.9f ? 1.0f : std::fabs(value);
    for (float& value : beta) value = std::fabs(value);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t head = 0; head < heads.num_k_heads; ++head) {
        float* key = qkv.data() + row * heads.width() + (heads.num_k_heads + head) * heads.k_dim;
        float sum = 1e-6f;
        for (std::size_t i = 0; i < heads.k_dim; ++i) sum += key[i] * key[i];
        const float factor = row % 11 == 5 ? 0.0f : 1.0f / std::sqrt(sum);
        for (std::size_t i = 0; i < heads.k_dim; ++i) key[i] *= factor;
      }
    }
  }

  DeltaRuleArgs args() const {
    return {.qkv = qkv.data(),
            .decay = decay.data(),
            .beta = beta.data(),
            .state = nullptr,
            .out = nullptr,
            .rows = rows,
            .num_k_heads = heads.num_k_heads,
            .num_v_heads = heads.num_v_heads,
            .k_dim = heads.k_dim,
            .v_dim = heads.v_dim,
            .scale = 0.125f};
  }

  Heads heads;
  std::size_t rows;
  std::vector<float> qkv, decay, beta, state;
};

struct Result {
  std::vector<float> out, state;
};

// Computes the result in calls of at most `chunk` rows and one head.
Result run(DeltaRuleFunction* function, const Problem& problem, std::size_t chunk) {
  const Heads& heads = problem.heads;
  const std::size_t out_width = heads.num_v_heads * heads.v_dim;
  const GuardedBuffer<float> qkv(problem.qkv), decay(problem.decay), beta(problem.beta), state(problem.state);
  const GuardedBuffer<float> out(problem.rows * out_width);
  const GuardedBuffer<float> scratch(delta_rule_scratch_floats(heads.k_dim, heads.v_dim));
  for (std::size_t first = 0; first < problem.rows; first += chunk) {
    DeltaRuleArgs args = problem.args();
    args.qkv = qkv.data() + first * heads.width();
    args.decay = decay.data() + first * heads.num_v_heads;
    args.beta = beta.data() + first * heads.num_v_heads;
    args.state = state.data();
    args.out = out.data() + first * out_width;
    args.rows = std::min(chunk, problem.rows - first);
    for (std::size_t head = heads.num_v_heads; head-- > 0;) function(args, head, head + 1, scratch.data());
  }
  return {out.copy(), state.copy()};
}

// The step formula in double precision.
std::pair<std::vector<double>, std::vector<double>> truth(const Problem& problem) {
  const Heads& heads = problem.heads;
  const DeltaRuleArgs args = problem.args();
  std::vector<double> out, state(problem.state.begin(), problem.state.end()), delta(heads.v_dim);
  for (std::size_t row = 0; row < problem.rows; ++row) {
    for (std::size_t head = 0; head < heads.num_v_heads; ++head) {
      const std::size_t k_head = head / (heads.num_v_heads / heads.num_k_heads);
      const float* q = args.qkv + row * heads.width() + k_head * heads.k_dim;
      const float* k = q + heads.num_k_heads * heads.k_dim;
      const float* v =
          args.qkv + row * heads.width() + 2 * heads.num_k_heads * heads.k_dim + head * heads.v_dim;
      const auto decay = static_cast<double>(args.decay[row * heads.num_v_heads + head]);
      const auto beta = static_cast<double>(args.beta[row * heads.num_v_heads + head]);
      double* s = state.data() + head * heads.k_dim * heads.v_dim;
      for (std::size_t j = 0; j < heads.v_dim; ++j) {
        double recalled = 0.0, value = 0.0;
        for (std::size_t i = 0; i < heads.k_dim; ++i) {
          s[i * heads.v_dim + j] *= decay;
          recalled += s[i * heads.v_dim + j] * static_cast<double>(k[i]);
        }
        delta[j] = beta * (static_cast<double>(v[j]) - recalled);
        for (std::size_t i = 0; i < heads.k_dim; ++i) {
          s[i * heads.v_dim + j] += static_cast<double>(k[i]) * delta[j];
          value += s[i * heads.v_dim + j] * static_cast<double>(q[i]) * static_cast<double>(args.scale);
        }
        out.push_back(value);
      }
    }
  }
  return {out, state};
}

template <typename T>
void check_near(const std::vector<float>& found, const std::vector<T>& expected, double tolerance,
                const std::string& what) {
  double limit = 1e-30;
  for (const T value : expected) limit = std::max(limit, std::fabs(static_cast<double>(value)));
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double error = std::fabs(static_cast<double>(found[i]) - static_cast<double>(expected[i]));
    check(error <= tolerance * limit, [&] {
      return what + ": element " + std::to_string(i) + " is off by " +
             std::to_string(error / limit * 0x1p24) + " units of the largest";
    });
  }
}

void test_delta_rule(DeltaRuleFunction* function) {
  for (const Heads& heads : kHeads) {
    for (const std::size_t rows : kRowCounts) {
      const Problem problem(heads, rows);
      const auto [expected, expected_state] = truth(problem);
      const Result found = run(function, problem, rows);
      const std::string what = heads.text() + ", " + std::to_string(rows) + " rows";
      // Sums of k_dim products, plus one for each row that is in the state.
      const double tolerance = static_cast<double>(heads.k_dim + 64) * 0x1p-24;
      check_near(found.out, expected, tolerance, what);
      check_near(found.state, expected_state, tolerance, what + ", state");
      const Result reference = run(gated_delta_rule_f32_f32_reference, problem, rows);
      check_near(found.out, reference.out, 1e-5, what + ", against the reference");
      check_near(found.state, reference.state, 1e-5, what + ", state against the reference");
      for (const std::size_t chunk : {1u, 2u, 31u, 32u, 33u}) {
        const Result parts = run(function, problem, chunk);
        check_near(parts.out, found.out, 1e-5, what + ", chunks of " + std::to_string(chunk));
        check_near(parts.state, found.state, 1e-5, what + ", state, chunks of " + std::to_string(chunk));
      }
    }
  }
}

// All implementations except the reference give results that are bit-identical to those of the first
// supported one.
void test_delta_rule_bits(DeltaRuleFunction* function) {
  if (function == gated_delta_rule_f32_f32_reference) return;
  for (const KernelRow<DeltaRuleFunction>& row : gated_delta_rule_f32_f32.rows) {
    if (row.isa == Isa::reference || !row.is_supported()) continue;
    for (const Heads& heads : kHeads) {
      const Problem problem(heads, 37);
      const Result found = run(function, problem, 37), expected = run(row.function, problem, 37);
      check_same(found.out.data(), expected.out.data(), found.out.size(), heads.text());
      check_same(found.state.data(), expected.state.data(), found.state.size(), heads.text() + ", state");
    }
    return;
  }
}

void test_not_a_number(DeltaRuleFunction* function) {
  Problem problem({2, 4, 24, 80}, 40);
  const Result clean = run(function, problem, 40);
  const std::size_t width = problem.heads.width(), out_width = 4 * 80;
  std::fill_n(problem.qkv.begin() + static_cast<std::ptrdiff_t>(20 * width), width,
              std::numeric_limits<float>::quiet_NaN());
  const Result found = run(function, problem, 40);
  check_same(found.out.data(), clean.out.data(), 20 * out_width, "rows before");
  for (std::size_t i = 20 * out_width; i < found.out.size(); ++i)
    check(std::isnan(found.out[i]), "rows after");
}

struct StateSpaceProblem {
  StateSpaceProblem(const Heads& shape, std::size_t num_rows) : heads(shape), rows(num_rows) {
    Random random(static_cast<std::uint32_t>(rows * 137 + shape.v_dim));
    cbx = random.floats(rows * heads.width(), 1.0f);
    decay = random.floats(rows * heads.num_v_heads, 1.0f);
    step = random.floats(rows * heads.num_v_heads, 1.0f);
    skip = random.floats(heads.num_v_heads, 2.0f);
    state = random.floats(heads.num_v_heads * heads.k_dim * heads.v_dim, 1.0f);
    for (float& value : decay) value = value < -0.9f ? 0.0f : value > 0.9f ? 1.0f : std::fabs(value);
    for (float& value : step) value = std::fabs(value);
  }

  Heads heads;
  std::size_t rows;
  std::vector<float> cbx, decay, step, skip, state;
};

// Computes the result in calls of at most `chunk` rows and one head.
Result run(StateSpaceFunction* function, const StateSpaceProblem& problem, std::size_t chunk) {
  const Heads& heads = problem.heads;
  const std::size_t out_width = heads.num_v_heads * heads.v_dim;
  const GuardedBuffer<float> cbx(problem.cbx), decay(problem.decay), step(problem.step);
  const GuardedBuffer<float> skip(problem.skip), state(problem.state), out(problem.rows * out_width);
  for (std::size_t first = 0; first < problem.rows; first += chunk) {
    const StateSpaceArgs args = {.cbx = cbx.data() + first * heads.width(),
                                 .decay = decay.data() + first * heads.num_v_heads,
                                 .step = step.data() + first * heads.num_v_heads,
                                 .skip = skip.data(),
                                 .state = state.data(),
                                 .out = out.data() + first * out_width,
                                 .rows = std::min(chunk, problem.rows - first),
                                 .num_groups = heads.num_k_heads,
                                 .num_heads = heads.num_v_heads,
                                 .state_dim = heads.k_dim,
                                 .head_dim = heads.v_dim};
    for (std::size_t head = heads.num_v_heads; head-- > 0;) function(args, head, head + 1);
  }
  return {out.copy(), state.copy()};
}

// The recurrence in double precision.
struct StateSpaceTruth {
  explicit StateSpaceTruth(const StateSpaceProblem& problem) {
    const Heads& heads = problem.heads;
    state.assign(problem.state.begin(), problem.state.end());
    for (std::size_t row = 0; row < problem.rows; ++row) {
      for (std::size_t head = 0; head < heads.num_v_heads; ++head) {
        const std::size_t group = head / (heads.num_v_heads / heads.num_k_heads);
        const float* const c = problem.cbx.data() + row * heads.width() + group * heads.k_dim;
        const float* const b = c + heads.num_k_heads * heads.k_dim;
        const float* const x = problem.cbx.data() + row * heads.width() +
                               2 * heads.num_k_heads * heads.k_dim + head * heads.v_dim;
        const double decay = problem.decay[row * heads.num_v_heads + head];
        const double step = problem.step[row * heads.num_v_heads + head];
        for (std::size_t j = 0; j < heads.v_dim; ++j) {
          double sum = static_cast<double>(problem.skip[head]) * static_cast<double>(x[j]);
          for (std::size_t i = 0; i < heads.k_dim; ++i) {
            double& s = state[(head * heads.k_dim + i) * heads.v_dim + j];
            s = decay * s + static_cast<double>(b[i]) * step * static_cast<double>(x[j]);
            sum += static_cast<double>(c[i]) * s;
          }
          out.push_back(sum);
        }
      }
    }
  }

  std::vector<double> out, state;
};

void test_state_space(StateSpaceFunction* function) {
  for (const Heads& heads : kHeads) {
    for (const std::size_t rows : kRowCounts) {
      const StateSpaceProblem problem(heads, rows);
      const std::string what = heads.text() + ", " + std::to_string(rows) + " rows";
      const Result found = run(function, problem, rows);
      const StateSpaceTruth truth(problem);
      check_near(found.out, truth.out, 1e-5, what);
      check_near(found.state, truth.state, 1e-5, what + ", state");
      for (const std::size_t chunk : {1u, 2u, 3u, 31u, 32u}) {
        const Result parts = run(state_space_f32_f32_reference, problem, chunk);
        check_same(found.out.data(), parts.out.data(), found.out.size(), what);
        check_same(found.state.data(), parts.state.data(), found.state.size(), what + ", state");
        const Result own = run(function, problem, chunk);
        check_same(found.out.data(), own.out.data(), found.out.size(), what + ", chunks");
        check_same(found.state.data(), own.state.data(), found.state.size(), what + ", state, chunks");
      }
    }
  }
}

// A selective scan of 40 rows, in chunks, and its result in double precision.
struct Scan {
  Scan(std::size_t channels, std::size_t state_dim)
      : channels(channels),
        state_dim(state_dim),
        x(Random(1).floats(kRows * channels, 1.0f)),
        step(Random(2).floats(kRows * channels, 1.0f)),
        bc(Random(3).floats(kRows * 2 * state_dim, 1.0f)),
        rates(Random(4).floats(state_dim * channels, 1.0f)),
        skip(Random(5).floats(channels, 1.0f)),
        state(Random(6).floats(state_dim * channels, 1.0f)) {
    for (float& s : step) s = std::fabs(s);
    for (float& a : rates) a = -4.0f * std::fabs(a);
    rates[0] = -300.0f;  // its decay is 0
  }

  std::pair<std::vector<float>, std::vector<float>> run(SelectiveScanFunction* function,
                                                        std::size_t chunk) const {
    const GuardedBuffer<float> left(x), steps(step), columns(bc), of_rates(rates), skips(skip);
    const GuardedBuffer<float> states(state), out(x.size());
    for (std::size_t first = 0; first < kRows; first += chunk) {
      const SelectiveScanArgs args = {.x = left.data() + first * channels,
                                      .step = steps.data() + first * channels,
                                      .bc = columns.data() + first * 2 * state_dim,
                                      .rates = of_rates.data(),
                                      .skip = skips.data(),
                                      .state = states.data(),
                                      .out = out.data() + first * channels,
                                      .rows = std::min(chunk, kRows - first),
                                      .channels = channels,
                                      .state_dim = state_dim};
      for (std::size_t item = convolution_items(channels); item-- > 0;) function(args, item, item + 1);
    }
    return {out.copy(), states.copy()};
  }

  std::vector<double> truth() const {
    std::vector<double> states(state.begin(), state.end()), out(x.size());
    for (std::size_t row = 0; row < kRows; ++row) {
      for (std::size_t d = 0; d < channels; ++d) {
        const double u = static_cast<double>(x[row * channels + d]);
        const double dt = static_cast<double>(step[row * channels + d]);
        double& y = out[row * channels + d] = static_cast<double>(skip[d]) * u;
        for (std::size_t n = 0; n < state_dim; ++n) {
          const double b = static_cast<double>(bc[row * 2 * state_dim + n]);
          const double c = static_cast<double>(bc[row * 2 * state_dim + state_dim + n]);
          double& s = states[n * channels + d];
          s = std::exp(dt * static_cast<double>(rates[n * channels + d])) * s + b * dt * u;
          y += c * s;
        }
      }
    }
    return out;
  }

  static constexpr std::size_t kRows = 40;
  std::size_t channels, state_dim;
  std::vector<float> x, step, bc, rates, skip, state;
};

void test_selective_scan(SelectiveScanFunction* function) {
  for (const std::size_t channels : {1u, 15u, 16u, 17u, 64u, 65u, 130u}) {
    for (const std::size_t state_dim : {1u, 5u, 16u}) {
      const Scan scan(channels, state_dim);
      const auto [expected, state] = scan.run(selective_scan_f32_f32_reference, Scan::kRows);
      const std::string what =
          std::to_string(channels) + " channels, " + std::to_string(state_dim) + " states";
      check_near(expected, scan.truth(), 1e-5, what);
      for (const std::size_t chunk : {1u, 7u, 40u}) {
        const auto [found, found_state] = scan.run(function, chunk);
        check_same(found.data(), expected.data(), found.size(), what);
        check_same(found_state.data(), state.data(), state.size(), what + ", state");
      }
    }
  }
}

struct Convolved {
  std::vector<float> out, state;
};

Convolved convolve(ConvolutionFunction* function, std::size_t channels, std::size_t taps, bool is_gated,
                   std::size_t rows, std::size_t chunk) {
  Random random(static_cast<std::uint32_t>(channels * 8 + taps));
  const std::size_t stride = is_gated ? 3 * channels : channels + 5;
  const GuardedBuffer<float> input(random.floats((rows - 1) * stride + (is_gated ? stride : channels), 1.0f));
  const GuardedBuffer<float> weight(random.floats(channels * taps, 1.0f)),
      bias(random.floats(channels, 1.0f));
  const GuardedBuffer<float> state(random.floats(channels * (taps - 1), 1.0f)), out(rows * channels);
  const GuardedBuffer<float> scratch(convolution_scratch_floats(taps));
  for (std::size_t first = 0; first < rows; first += chunk) {
    const float* row = input.data() + first * stride;
    const ConvolutionArgs args = {.input = is_gated ? row + 2 * channels : row,
                                  .in_gate = is_gated ? row : nullptr,
                                  .out_gate = is_gated ? row + channels : nullptr,
                                  .weight = weight.data(),
                                  .bias = is_gated ? nullptr : bias.data(),
                                  .state = state.data(),
                                  .out = out.data() + first * channels,
                                  .rows = std::min(chunk, rows - first),
                                  .channels = channels,
                                  .taps = taps,
                                  .input_stride = stride};
    for (std::size_t item = convolution_items(channels); item-- > 0;) {
      function(args, item, item + 1, scratch.data());
    }
  }
  return {out.copy(), state.copy()};
}

// The Python tests check the formula itself.
void test_convolution(ConvolutionFunction* function) {
  for (const std::size_t channels : {1u, 16u, 63u, 64u, 65u, 200u}) {
    for (const std::size_t taps : {2u, 3u, 4u, 7u}) {
      for (const bool is_gated : {false, true}) {
        const Convolved expected =
            convolve(causal_convolution_f32_f32_reference, channels, taps, is_gated, 40, 40);
        for (const std::size_t chunk : {1u, 2u, 7u, 40u}) {
          const Convolved found = convolve(function, channels, taps, is_gated, 40, chunk);
          const std::string what = std::to_string(channels) + " channels, " + std::to_string(taps) +
                                   " taps, chunks of " + std::to_string(chunk);
          check_same(found.out.data(), expected.out.data(), found.out.size(), what);
          check_same(found.state.data(), expected.state.data(), found.state.size(), what + ", state");
        }
      }
    }
  }
}

}  // namespace

void test_linear_attention(Suite& suite) {
  suite.run_rows(causal_convolution_f32_f32, "bits of the reference, in any chunks", test_convolution);
  suite.run_rows(gated_delta_rule_f32_f32, "double precision, the reference, any chunks", test_delta_rule);
  suite.run_rows(gated_delta_rule_f32_f32, "the same bits on all", test_delta_rule_bits);
  suite.run_rows(state_space_f32_f32, "double precision, and bits of the reference, in any chunks",
                 test_state_space);
  suite.run_rows(selective_scan_f32_f32, "double precision, and bits of the reference, in any chunks",
                 test_selective_scan);
  suite.run_rows(gated_delta_rule_f32_f32, "NaNs and infinities reach no earlier row", test_not_a_number);
}

}  // namespace chunkrt::testing
