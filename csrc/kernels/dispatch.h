// The interface of the kernels, and the choice among the implementations of a kernel. Kernel files for an
// instruction set never include this header, so that no inline function is compiled under two sets of flags.
#pragma once

#include <span>
#include <stdexcept>
#include <string_view>

#include "kernels/isa.h"
#include "kernels/list.h"

namespace chunkrt {

// A compiled implementation of a kernel, with its full name and its function.
template <typename Function>
struct KernelRow {
  Isa isa;
  std::string_view name;
  Function* function;

  bool is_supported() const { return chunkrt::is_supported(isa); }
};

template <typename Function>
struct Kernel {
  std::string_view name;
  std::span<const KernelRow<Function>> rows;  // best first, the portable one last
};

#define CHUNKRT_ROW(name, Function, isa) {Isa::isa, #name "_" #isa, name##_##isa},
#define CHUNKRT_DEFINE_KERNEL(name, Function, ISAS)                                         \
  inline constexpr KernelRow<Function> name##_rows[] = {ISAS(CHUNKRT_ROW, name, Function)}; \
  inline constexpr Kernel<Function> name = {#name, name##_rows};
CHUNKRT_KERNELS(CHUNKRT_DEFINE_KERNEL)
#undef CHUNKRT_DEFINE_KERNEL
#undef CHUNKRT_ROW

// Calls visit(kernel) for every kernel.
template <typename Visitor>
void for_each_kernel(const Visitor& visit) {
#define CHUNKRT_VISIT(name, Function, ISAS) visit(name);
  CHUNKRT_KERNELS(CHUNKRT_VISIT)
#undef CHUNKRT_VISIT
}

// The best implementation that is supported and not above the selection limit (CHUNKRT_FORCE_ISA). An
// instruction set that is slow on this processor is selected only if it is the limit.
template <typename Function>
const KernelRow<Function>& select_kernel(const Kernel<Function>& kernel) {
  const Isa limit = selection_limit();
  for (const KernelRow<Function>& row : kernel.rows) {
    if (row.isa <= limit && row.is_supported() && (row.isa == limit || is_fast(row.isa))) return row;
  }
  throw std::logic_error("a kernel has no portable implementation");
}

}  // namespace chunkrt
