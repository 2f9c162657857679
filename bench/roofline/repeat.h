// The loop around an instruction mix that every table of peaks repeats.
//
// Everything in here is local to its file, so that no function is compiled under two sets of flags.
#pragma once

#include <cstddef>

#if defined(__AVX512F__)
#define CHUNKRT_IN_VECTOR_REGISTER "+v"
#elif defined(__x86_64__)
#define CHUNKRT_IN_VECTOR_REGISTER "+x"
#else
#define CHUNKRT_IN_VECTOR_REGISTER "+w"
#endif

namespace chunkrt::roofline {
namespace {

// Hides the content of `value` from the compiler, so that it cannot move its uses out of a loop; costs
// nothing.
template <typename Vector>
void hide(Vector& value) {
  asm volatile("" : CHUNKRT_IN_VECTOR_REGISTER(value));
}

// `rounds` times one step into each of the sums; their second operand is a register, or is read from memory
// that stays in the first-level cache.
template <std::size_t Sums, bool Loads, typename Vector, typename Step>
void repeat(std::size_t rounds, Vector left, Vector right, Step step) {
  Vector memory[Sums];
  for (Vector& one : memory) one = right;
  Vector sums[Sums] = {};
  const Vector* source = memory;
  for (; rounds > 0; --rounds) {
    asm volatile("" : "+r"(source) : : "memory");
#pragma GCC unroll 24
    for (std::size_t i = 0; i < Sums; ++i) {
      hide(left);
      sums[i] = step(sums[i], left, Loads ? source[i] : right);
    }
  }
#pragma GCC unroll 24
  for (std::size_t i = 0; i < Sums; ++i) hide(sums[i]);
}

}  // namespace
}  // namespace chunkrt::roofline
