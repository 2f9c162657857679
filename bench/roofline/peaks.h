// The loops whose speed is a peak: each repeats one instruction mix on registers and nothing else.
//
// The files for instruction sets include this, repeat.h and their intrinsics only, so that no inline function
// is compiled under two sets of flags.
#pragma once

#include <cstddef>

namespace chunkrt::roofline {

// A loop. `work` is what one round does, in multiply-adds.
struct Peak {
  const char* kind;  // of the products: "int8", "int4", "bfloat16" or "float32"
  const char* instructions;
  const char* mix;  // how many sums do not wait for each other, and where the second operand comes from
  double work;
  void (*run)(std::size_t rounds);
};

// Reads `bytes`, a multiple of 1024, from 64-byte aligned `data`.
using ReadFunction = void(const char* data, std::size_t bytes);

struct PeakTable {
  const char* isa;  // as name_of(Isa) has it
  const Peak* peaks;
  std::size_t num_peaks;
  ReadFunction* read;  // nullptr where another instruction set's serves as well
};

extern const PeakTable kPeaksAvx2, kPeaksAvxVnni, kPeaksAvx512Vnni, kPeaksAmx, kPeaksAmxBf16;
extern const PeakTable kPeaksNeon, kPeaksNeonDotprod, kPeaksNeonI8mm;

// The tables that were built, best last.
struct PeakTables {
  const PeakTable* const* tables;
  std::size_t count;
};
PeakTables built_peaks();

// Whether this processor has the table's instruction set.
bool is_supported(const PeakTable& table);

// The widest loads of this processor.
ReadFunction* widest_read();

}  // namespace chunkrt::roofline
