// Bindings that report the instruction sets that are compiled, available on this processor, and selected.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings/parts.h"
#include "kernels/dispatch.h"

namespace py = pybind11;

namespace chunkrt {
namespace {

std::map<std::string, bool> isas(bool (*holds)(Isa)) {
  std::map<std::string, bool> answers;
  for (const Isa isa : kAllIsas) answers[std::string(name_of(isa))] = holds(isa);
  return answers;
}

std::map<std::string, std::string> selected_kernels() {
  std::map<std::string, std::string> selected;
  for_each_kernel([&selected](const auto& kernel) {
    selected[std::string(kernel.name)] = name_of(select_kernel(kernel).isa);
  });
  return selected;
}

}  // namespace

void bind_cpu(py::module_& module) {
  module.def(
      "architecture", [] { return std::string(architecture()); },
      "Architecture that this module was compiled for.");
  module.def(
      "built_isas", [] { return isas(is_built); }, "By name: True if kernels for it are in this module.");
  module.def("present_isas", [] { return isas(is_present); }, "By name: True if this processor has it.");
  module.def(
      "supported_isas", [] { return isas(is_supported); },
      "By name: True if this processor has it, and the operating system allows it.");
  module.def("selected_kernels", selected_kernels,
             "By kernel: the selected instruction set, under CHUNKRT_FORCE_ISA if that is set.");
}

}  // namespace chunkrt
