// Reproducible random arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace chunkrt::testing {

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  // float32 in [-limit, limit].
  std::vector<float> floats(std::size_t count, float limit) {
    std::vector<float> values(count);
    for (float& value : values) value = limit * (static_cast<float>(engine_()) * 0x1p-31f - 1.0f);
    return values;
  }

  // Values from -128 to 127; the two ends are more frequent than other values.
  std::vector<std::int8_t> int8s(std::size_t count) {
    std::vector<std::int8_t> values(count);
    for (std::int8_t& value : values) {
      const auto bits = static_cast<std::uint32_t>(engine_());
      const bool at_end = bits % 8 == 0;
      value = static_cast<std::int8_t>(at_end ? (bits & 8 ? 127 : -128) : static_cast<int>(bits >> 24) - 128);
    }
    return values;
  }

 private:
  std::mt19937 engine_;
};

}  // namespace chunkrt::testing
