// Durations of programs' steps. Only programs that are built with StepTimes read the clock.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace chunkrt {

using Nanoseconds = std::chrono::nanoseconds;

// Name of the time that a caller spends in a program outside all steps: binding arrays, opening loops, and
// waiting for its turn and for the other threads.
inline constexpr std::size_t kBetweenSteps = 0;

// One thread's time in one run, by part.
class Stopwatch {
 public:
  // Starts the measurement.
  explicit Stopwatch(std::size_t num_parts) : times_(num_parts), since_(Clock::now()) {}

  // Attributes the time since the last lap to a part.
  void lap(std::size_t part) {
    const Clock::time_point now = Clock::now();
    times_[part] += now - since_;
    since_ = now;
  }

  const std::vector<Nanoseconds>& times() const { return times_; }

 private:
  using Clock = std::chrono::steady_clock;

  std::vector<Nanoseconds> times_;
  Clock::time_point since_;
};

// Sums of times by name, over all runs and threads of the programs that share this object. Threads may add
// concurrently.
class StepTimes {
 public:
  struct Sums {
    Nanoseconds callers{};                          // from the begin to the end of runs
    std::map<std::string, Nanoseconds> parts = {};  // over all threads
  };

  // `watches` are those of a run; the first belongs to the caller. The time of helpers between steps does not
  // count, because helpers may work for other programs.
  void add(std::span<const std::string> parts, std::span<const Stopwatch> watches);
  // Returns the sums so far, and resets them.
  Sums take();

 private:
  std::mutex mutex_;
  Sums sums_;
};

}  // namespace chunkrt
