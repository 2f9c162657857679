// Tests the selection of kernels: names, availability, and CHUNKRT_FORCE_ISA.
#include <cstdlib>

#include "kernels/dispatch.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

void set_forced_isa(const std::string& name) {
#if defined(_WIN32)
  _putenv_s("CHUNKRT_FORCE_ISA", name.c_str());
#else
  setenv("CHUNKRT_FORCE_ISA", name.c_str(), 1);
#endif
}

// Restores the variable on destruction.
class KeepForcedIsa {
 public:
  KeepForcedIsa() {
    if (const char* value = std::getenv("CHUNKRT_FORCE_ISA")) before_ = value;
  }
  ~KeepForcedIsa() { set_forced_isa(before_); }

 private:
  std::string before_;
};

std::string message_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  throw Failure("nothing was thrown");
}

void test_names() {
  for (const Isa isa : kAllIsas) {
    const std::string name(name_of(isa));
    if (is_built(isa) && is_supported(isa)) {
      check(require_isa(name) == isa, [&] { return name + " names another instruction set"; });
    } else {
      const std::string message = message_of([&] { require_isa(name); });
      const std::string expected = is_built(isa) ? "does not support" : "are not built";
      check(message.find(expected) != std::string::npos, [&] { return "unexpected message: " + message; });
    }
  }
  check(message_of([] { require_isa("avx3"); }).find("avx512vnni") != std::string::npos,
        "an unknown name's message does not list the known ones");
}

template <typename Function>
void check_selection(const Kernel<Function>& kernel, Isa limit) {
  const std::string name(kernel.name);
  check(kernel.rows.back().isa == Isa::reference,
        [&] { return name + "'s last implementation is not the portable one"; });
  const KernelRow<Function>& selected = select_kernel(kernel);
  check(selected.isa <= limit, [&] { return std::string(selected.name) + " exceeds CHUNKRT_FORCE_ISA"; });
  for (const KernelRow<Function>& row : kernel.rows) {
    const std::string full_name(row.name);
    check(full_name == name + "_" + std::string(name_of(row.isa)),
          [&] { return full_name + " has a wrong name"; });
    check(is_built(row.isa), [&] { return full_name + " and its instruction set disagree on being built"; });
    const bool is_usable = row.is_supported() && row.isa <= limit && (row.isa == limit || is_fast(row.isa));
    check(!is_usable || row.isa <= selected.isa,
          [&] { return full_name + " is better than the selected one"; });
  }
}

void check_all_selections(Isa limit) {
  for_each_kernel([limit](const auto& kernel) { check_selection(kernel, limit); });
}

void test_selection() {
  const KeepForcedIsa keep;
  set_forced_isa("");
  check_all_selections(kAllIsas.back());
  for (const Isa isa : kAllIsas) {
    set_forced_isa(std::string(name_of(isa)));
    if (is_built(isa) && is_supported(isa)) {
      check_all_selections(isa);
    } else {
      const std::string message = message_of([] { select_kernel(gemm_f32_s8row_s8col); });
      check(message.starts_with("CHUNKRT_FORCE_ISA"), [&] { return "unexpected message: " + message; });
    }
  }
}

// Values of the register ID_AA64ISAR1_EL1. Source: the processors of QEMU, target/arm.
void test_arm_features() {
  struct Case {
    std::uint64_t value;
    bool has_i8mm, has_bf16;
  };
  for (const Case& each : {Case{0x0010111101211052, true, true},    // Cortex-A710
                           Case{0x0011111101211052, true, true},    // Neoverse N2
                           Case{0x0000000000100001, false, false},  // Cortex-A76, Neoverse N1
                           Case{0x0020000000000000, true, false},   // a later version of the instructions
                           Case{0x0000200000000000, false, true}}) {
    const ArmFeatures found = decode_id_aa64isar1(each.value);
    check(found.has_i8mm == each.has_i8mm && found.has_bf16 == each.has_bf16,
          [&] { return "wrong features for ID_AA64ISAR1_EL1 = " + std::to_string(each.value); });
  }
}

}  // namespace

void test_isa(Suite& suite) {
  suite.run("isa: names and their errors", test_names);
  suite.run("isa: features of Arm processors from ID_AA64ISAR1_EL1", test_arm_features);
  suite.run("isa: selection and CHUNKRT_FORCE_ISA", test_selection);
}

}  // namespace chunkrt::testing
