// Vectors of 16 lanes for the kernels whose code is the same on all instruction sets: Floats (float32), Ints
// (int32) and Mask. This header includes the vectors of the instruction set that the including file is
// compiled for, and adds the operations that need no instruction of their own. Everything here is in an
// anonymous namespace, so that no function is compiled under two sets of flags.
//
// avx512.h, avx2.h and neon.h define the same operations, with bit-identical results for operands without
// NaNs; a NaN gives a NaN, except where a comment says otherwise. avx2.h describes them. A new instruction
// set needs one such header, a line below, and the files `kernels/*/<isa>.cc`.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// A vector of two or more registers is passed in memory unless the function is inlined.
#if defined(_MSC_VER) && !defined(__clang__)
#define CHUNKRT_LANES __forceinline
#else
#define CHUNKRT_LANES [[gnu::always_inline]] inline
#endif

// intrinsic(registers of the operands), for each register of a vector.
#define CHUNKRT_EACH(Result, intrinsic, ...) \
  each<Result>([](auto... registers) { return intrinsic(registers...); }, __VA_ARGS__)

#if defined(__AVX512F__)
#include "kernels/lanes/avx512.h"
#elif defined(__AVX2__)
#include "kernels/lanes/avx2.h"
#else
#include "kernels/lanes/neon.h"
#endif

namespace chunkrt {
namespace {

inline constexpr std::size_t kLanes = 16;

// The first min(count, 16) lanes; loaded lanes after them are 0.
CHUNKRT_LANES Floats load(const float* from, std::size_t count) {
  return count >= kLanes ? load(from) : load(from, Rest(count));
}
CHUNKRT_LANES void store(float* to, Floats x, std::size_t count) {
  if (count >= kLanes) {
    store(to, x);
  } else {
    store(to, x, Rest(count));
  }
}
CHUNKRT_LANES void store_bytes(std::int8_t* to, Ints x, std::size_t count) {
  if (count >= kLanes) {
    store_bytes(to, x);
  } else {
    store_bytes(to, x, Rest(count));
  }
}

// c[0] + z (c[1] + z (...)).
CHUNKRT_LANES Floats polynomial(const float (&c)[5], Floats z) {
  Floats q = all(c[4]);
  for (int i = 3; i >= 0; --i) q = multiply_add(q, z, all(c[i]));
  return q;
}

}  // namespace
}  // namespace chunkrt
