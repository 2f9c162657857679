// Views of NumPy arrays for programs, without copies or conversions.
#pragma once

#include <pybind11/numpy.h>

#include "program/value.h"

namespace chunkrt {

TensorView view_of(const pybind11::array& array);

}  // namespace chunkrt
