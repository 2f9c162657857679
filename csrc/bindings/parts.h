// The parts of the extension module; a separate file defines each part.
#pragma once

#include <pybind11/pybind11.h>

namespace chunkrt {

void bind_cpu(pybind11::module_& module);
void bind_program(pybind11::module_& module);

}  // namespace chunkrt
