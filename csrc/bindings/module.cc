// The extension module chunkrt._native: a table of contents.
#include "bindings/parts.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "chunkrt's C++ core: programs of kernels over a thread pool.";
  chunkrt::bind_cpu(module);
  chunkrt::bind_program(module);
}
