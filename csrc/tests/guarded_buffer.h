// A buffer that ends at an inaccessible page, so that reading or writing past it crashes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

namespace chunkrt::testing {

// Memory between two inaccessible pages, aligned to its end.
class GuardedPages {
 public:
  explicit GuardedPages(std::size_t num_bytes);
  ~GuardedPages();
  GuardedPages(const GuardedPages&) = delete;
  GuardedPages& operator=(const GuardedPages&) = delete;

  // The first of num_bytes bytes; the guard page follows the last. Aligned as much as num_bytes is.
  void* data() const { return data_; }

 private:
  void* mapping_;
  [[maybe_unused]] std::size_t mapping_bytes_;
  void* data_;
};

// `size` elements of T in guarded pages, copied from `initial` or initialised to zero.
template <typename T>
  requires std::is_trivially_copyable_v<T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::size_t size) : pages_(size * sizeof(T)), size_(size) {}
  explicit GuardedBuffer(const std::vector<T>& initial) : GuardedBuffer(initial.size()) {
    std::copy(initial.begin(), initial.end(), data());
  }

  T* data() const { return static_cast<T*>(pages_.data()); }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) const { return data()[i]; }
  std::vector<T> copy() const { return {data(), data() + size_}; }

 private:
  GuardedPages pages_;
  std::size_t size_;
};

}  // namespace chunkrt::testing
