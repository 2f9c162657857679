// NumPy arrays as the program sees them: no copies, no conversions.
#pragma once

#include <pybind11/numpy.h>

#include "program/value.h"

namespace chunkrt {

TensorView view_of(const pybind11::array& array);

}  // namespace chunkrt
