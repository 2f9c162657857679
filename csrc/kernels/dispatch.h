// Choosing among the implementations of one kernel. For the dispatch.cc files and their callers; kernel files
// for an instruction set never include this, so that no inline function is compiled under two sets of flags.
#pragma once

#include <span>
#include <stdexcept>
#include <string>

#include "kernels/isa.h"

namespace chunkrt {

// One implementation of a kernel: its full name and its function, which is nullptr where it is not built.
template <typename Function>
struct KernelRow {
  Isa isa;
  const char* name;
  Function* function;

  bool is_built() const { return function != nullptr; }
  bool is_supported() const { return chunkrt::is_supported(isa); }
};

// All implementations of one kernel: best first, the portable one last.
template <typename Function>
using KernelTable = std::span<const KernelRow<Function>>;

// The best row that is built, supported and not above the selection limit (CHUNKRT_FORCE_ISA).
template <typename Function>
const KernelRow<Function>& select_kernel(KernelTable<Function> table) {
  const Isa limit = selection_limit();
  for (const KernelRow<Function>& row : table) {
    if (row.isa <= limit && row.is_built() && row.is_supported()) return row;
  }
  throw std::logic_error("a kernel has no portable implementation");
}

// The row of exactly this instruction set, which must be built and supported.
template <typename Function>
const KernelRow<Function>& find_kernel(KernelTable<Function> table, Isa isa) {
  for (const KernelRow<Function>& row : table) {
    if (row.isa == isa && row.is_built() && row.is_supported()) return row;
  }
  throw std::invalid_argument("this kernel has no implementation for " + std::string(name_of(isa)));
}

}  // namespace chunkrt
