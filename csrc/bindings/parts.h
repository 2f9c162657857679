// The parts of the extension module, one in each file.
#pragma once

#include <pybind11/pybind11.h>

namespace chunkrt {

void bind_cpu(pybind11::module_& module);
void bind_program(pybind11::module_& module);

}  // namespace chunkrt
