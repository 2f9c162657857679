#include "program/step_times.h"

#include <utility>

namespace chunkrt {

void StepTimes::add(std::span<const std::string> parts, std::span<const Stopwatch> watches) {
  const std::lock_guard lock(mutex_);
  for (std::size_t member = 0; member < watches.size(); ++member) {
    for (std::size_t part = 0; part < parts.size(); ++part) {
      if (member > 0 && part == kBetweenSteps) continue;
      const Nanoseconds time = watches[member].times()[part];
      if (member == 0) sums_.callers += time;
      if (time > Nanoseconds::zero()) sums_.parts[parts[part]] += time;
    }
  }
}

StepTimes::Sums StepTimes::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(sums_, {});
}

}  // namespace chunkrt
