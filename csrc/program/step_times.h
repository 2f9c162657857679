// How long programs take for each of their steps. Only those that are built with StepTimes look at the clock.
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

// The part of a caller's time in a program that no step has: binding arrays, opening loops, and waiting for a
// turn and for the other threads.
inline constexpr std::size_t kBetweenSteps = 0;

// One thread's time in one run, by part.
class Stopwatch {
 public:
  // Runs from now on.
  explicit Stopwatch(std::size_t num_parts) : times_(num_parts), since_(Clock::now()) {}

  // What has passed since the last lap was of that part.
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
    Nanoseconds callers{};                          // from begin to end of the runs
    std::map<std::string, Nanoseconds> parts = {};  // over all threads
  };

  // `watches`: a run's, the caller's first. What helpers do between steps is not counted: they may be
  // elsewhere.
  void add(std::span<const std::string> parts, std::span<const Stopwatch> watches);
  // The sums so far; they begin anew.
  Sums take();

 private:
  std::mutex mutex_;
  Sums sums_;
};

}  // namespace chunkrt
