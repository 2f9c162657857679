// Arithmetic on sizes. An overflow throws std::length_error.
#pragma once

#include <cstddef>
#include <limits>
#include <stdexcept>

namespace chunkrt {

inline std::size_t checked_multiply(std::size_t left, std::size_t right) {
  if (left != 0 && right > std::numeric_limits<std::size_t>::max() / left) {
    throw std::length_error("a program's sizes exceed the address space");
  }
  return left * right;
}

inline std::size_t checked_add(std::size_t left, std::size_t right) {
  if (right > std::numeric_limits<std::size_t>::max() - left) {
    throw std::length_error("a program's sizes exceed the address space");
  }
  return left + right;
}

inline std::size_t ceil_divide(std::size_t value, std::size_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

inline std::size_t round_up(std::size_t value, std::size_t multiple) {
  return checked_multiply(ceil_divide(value, multiple), multiple);
}

}  // namespace chunkrt
