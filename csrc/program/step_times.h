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

// The part of a caller's time in a program outside all steps: binding arrays, opening loops, and waiting for
// its turn and for the other threads.
inline constexpr std::size_t kBetweenSteps = 0;

// One thread's time in one run, by part.
class Stopwatch {
 public:
  // Starts now.
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

// Sums by name, over all runs and threads of the programs that share it. Threads may add at once.
class StepTimes {
 public:
  struct Sums {
    Nanoseconds callers{};                          // from the begin to the end of runs
    std::map<std::string, Nanoseconds> parts = {};  // over all threads
  };

  // `watches`: those of a run, the caller's first. The time of helpers between steps does not count: they may
  // work for other programs.
  void add(std::span<const std::string> parts, std::span<const Stopwatch> watches);
  // Returns the sums so far, and resets them.
  Sums take();

 private:
  std::mutex mutex_;
  Sums sums_;
};

}  // namespace chunkrt
