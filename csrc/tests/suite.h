// A small test harness: tests are functions that throw Failure; a Suite runs and counts them.
#pragma once

#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "kernels/dispatch.h"

namespace chunkrt::testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws Failure with the message unless the condition holds.
inline void check(bool condition, const std::string& message) {
  if (!condition) throw Failure(message);
}

// Like the function above, but builds the message only on failure; otherwise building messages would take
// most of the time.
template <std::invocable Message>
void check(bool condition, const Message& message) {
  if (!condition) throw Failure(message());
}

// Returns true if the floats have equal bits or are both NaN.
inline bool same(float left, float right) {
  return (std::isnan(left) && std::isnan(right)) ||
         std::bit_cast<std::uint32_t>(left) == std::bit_cast<std::uint32_t>(right);
}

// Throws Failure with the first element that differs, unless both arrays are bit-identical.
void check_same(const float* found, const float* expected, std::size_t count, const std::string& what);

class Suite {
 public:
  // Runs only tests whose names contain the filter; if it begins with "-", those whose names do not contain
  // the rest.
  explicit Suite(std::string filter) : filter_(std::move(filter)) {}

  void run(const std::string& name, const std::function<void()>& test);

  // Runs test(function) for every implementation of a kernel; implementations that this processor does not
  // support are skipped with a message.
  template <typename Function, std::invocable<Function*> Test>
  void run_rows(const Kernel<Function>& kernel, const std::string& name, const Test& test) {
    for (const KernelRow<Function>& row : kernel.rows) {
      const std::string full_name = std::string(row.name) + ": " + name;
      if (row.is_supported()) {
        run(full_name, [&] { test(row.function); });
      } else {
        skip(full_name, std::string(name_of(row.isa)) + " not supported by this processor");
      }
    }
  }

  // Reports a skipped test and the reason.
  void skip(const std::string& name, const std::string& reason);

  // Prints the counts; returns the exit status, which is 0 unless a test failed or none ran.
  int finish() const;

 private:
  bool is_wanted(const std::string& name) const;

  std::string filter_;
  std::size_t num_passed_ = 0, num_failed_ = 0, num_skipped_ = 0;
};

}  // namespace chunkrt::testing
