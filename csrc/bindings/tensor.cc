#include "bindings/tensor.h"

namespace py = pybind11;

namespace chunkrt {
namespace {

// A type name such as "float32"; it includes the byte order if that is not the processor's.
std::string dtype_name(const py::dtype& dtype) {
  const char kind = dtype.kind();
  const auto bits = [&dtype] { return std::to_string(dtype.itemsize() * 8); };
  if (dtype.byteorder() == '>') return "big-endian " + std::string(py::str(dtype));
  if (kind == 'f') return "float" + bits();
  if (kind == 'i') return "int" + bits();
  if (kind == 'u') return "uint" + bits();
  return py::str(dtype);
}

}  // namespace

TensorView view_of(const py::array& array) {
  constexpr int kNeeded =
      py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  TensorView view{.data = const_cast<void*>(array.data()),
                  .dtype = dtype_name(array.dtype()),
                  .shape = {},
                  .is_contiguous = (array.flags() & kNeeded) == kNeeded,
                  .is_writeable = array.writeable()};
  for (py::ssize_t i = 0; i < array.ndim(); ++i)
    view.shape.push_back(static_cast<std::size_t>(array.shape(i)));
  return view;
}

}  // namespace chunkrt
