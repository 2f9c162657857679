// The loops whose speed is a peak: each repeats only one instruction mix on registers.
//
// The files for instruction sets include this, repeat.h and their intrinsics only, so that no inline function
// is compiled under two sets of flags.
#pragma once

#include <cstddef>

namespace chunkrt::roofline {

// A loop. `work` is the number of multiply-adds of one round.
struct Peak {
  const char* kind;  // type of the products: "int8", "int4", "bfloat16" or "float32"
  const char* instructions;
  const char* mix;  // number of independent sums, and location of the second operand
  double work;
  void (*run)(std::size_t rounds);
};

// Reads `bytes`, a multiple of 1024, from 64-byte aligned `data`.
using ReadFunction = void(const char* data, std::size_t bytes);

struct PeakTable {
  const char* isa;  // as in name_of(Isa)
  const Peak* peaks;
  std::size_t num_peaks;
  ReadFunction* read;  // nullptr if another instruction set's function serves as well
};

extern const PeakTable kPeaksAvx2, kPeaksAvxVnni, kPeaksAvx512Vnni, kPeaksAvx512Bf16, kPeaksAmx,
    kPeaksAmxBf16;
extern const PeakTable kPeaksNeon, kPeaksNeonDotprod, kPeaksNeonI8mm, kPeaksNeonBf16;

// The compiled tables, best last.
struct PeakTables {
  const PeakTable* const* tables;
  std::size_t count;
};
PeakTables built_peaks();

// True if this processor has the table's instruction set.
bool is_supported(const PeakTable& table);

// The widest loads of this processor.
ReadFunction* widest_read();

}  // namespace chunkrt::roofline
