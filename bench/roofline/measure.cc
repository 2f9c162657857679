#include "measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace chunkrt::roofline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostCalls = std::size_t{1} << 40;
constexpr int kTries = 5;

#if defined(__linux__)

// Pins the calling thread to one of its allowed processors for the lifetime of this object: the operating
// system may leave two new threads on one processor for longer than a sample takes.
class Pin {
 public:
  explicit Pin(std::size_t thread) {
    sched_getaffinity(0, sizeof(allowed_), &allowed_);
    std::size_t num_before = thread % static_cast<std::size_t>(std::max(1, CPU_COUNT(&allowed_)));
    for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed_) || num_before-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      sched_setaffinity(0, sizeof(one), &one);
      return;
    }
  }
  ~Pin() { sched_setaffinity(0, sizeof(allowed_), &allowed_); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  cpu_set_t allowed_;
};

#else

struct Pin {
  explicit Pin(std::size_t) {}
};

#endif

// The minimum of some tries, because other processes only add to the time.
double least(const Body& body, std::size_t calls) {
  double seconds = measure(body, 1, calls);
  for (int i = 1; i < kTries; ++i) seconds = std::min(seconds, measure(body, 1, calls));
  return seconds;
}

}  // namespace

double measure(const Body& body, std::size_t num_threads, std::size_t calls) {
  std::vector<Clock::time_point> starts(num_threads), ends(num_threads);
  std::atomic<std::size_t> num_missing{num_threads};
  const auto work = [&](std::size_t thread) {
    std::optional<Pin> pin;
    if (num_threads > 1) pin.emplace(thread);
    num_missing.fetch_sub(1);
    while (num_missing.load() > 0) continue;
    const Clock::time_point start = Clock::now();
    body(thread, calls);
    ends[thread] = Clock::now();
    starts[thread] = start;
  };
  std::vector<std::thread> others;
  for (std::size_t thread = 1; thread < num_threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  const auto span =
      *std::max_element(ends.begin(), ends.end()) - *std::min_element(starts.begin(), starts.end());
  return std::chrono::duration<double>(span).count();
}

std::size_t find_calls(const Body& body, double seconds) {
  std::size_t calls = 1;
  double taken = least(body, calls);
  while (taken < seconds / 4 && calls < kMostCalls) {
    calls *= 2;
    taken = least(body, calls);
  }
  const double wanted = static_cast<double>(calls) * seconds / taken;
  return std::max<std::size_t>(1, static_cast<std::size_t>(wanted));
}

}  // namespace chunkrt::roofline
