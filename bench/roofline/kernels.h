// Timed operations: chunkrt's kernels, as selected by dispatch, with operands of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "measure.h"

namespace chunkrt::roofline {

inline constexpr std::size_t kAlignment = 64;

// The alignment of a program's memory, at which no row of a tile crosses a cache line.
template <typename T>
struct AlignedAllocator {
  using value_type = T;

  AlignedAllocator() = default;
  template <typename Other>
  AlignedAllocator(const AlignedAllocator<Other>&) {}

  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kAlignment}));
  }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, std::align_val_t{kAlignment}); }
  bool operator==(const AlignedAllocator&) const = default;
};

template <typename T>
using Aligned = std::vector<T, AlignedAllocator<T>>;

// 64-byte aligned and never 0: more weights than the caches hold, one after the other.
struct Ring {
  explicit Ring(std::size_t num_bytes);
  Aligned<std::uint64_t> words;
  char* bytes;
  std::size_t num_bytes;
};

// The name of the instruction set that dispatch selects for a kernel of this list.
std::string selected_isa(const std::string& kernel);

// One call is one product of [rows, depth] and a packed weight; a thread has its own rows, weights are
// shared. Streamed, every call takes the ring's next weight.
Body gemm(const Ring& ring, std::size_t num_threads, std::size_t rows, std::size_t depth, std::size_t columns,
          bool is_streamed);

// One call appends `rows` keys and values after `position` others to a float16 or a bfloat16 cache, and
// attends, in float32 or in bfloat16.
Body attention(std::size_t num_threads, std::size_t rows, std::size_t position, std::size_t num_heads,
               std::size_t num_kv_heads, std::size_t head_dim, AttentionMath math);

// One call is [rows, width].
Body rms_norm(std::size_t num_threads, std::size_t rows, std::size_t width);
Body quantize(std::size_t num_threads, std::size_t rows, std::size_t width);
Body silu_mul(std::size_t num_threads, std::size_t rows, std::size_t width);

}  // namespace chunkrt::roofline
