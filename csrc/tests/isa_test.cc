// Choosing a kernel: names, what is built and supported, CHUNKRT_FORCE_ISA.
#include <cstdlib>

#include "kernels/tables.h"
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

// Puts the variable back on the way out.
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
      check(require_isa(name) == isa, name + " names another instruction set");
    } else {
      const std::string message = message_of([&] { require_isa(name); });
      const std::string expected = is_built(isa) ? "does not support" : "are not built";
      check(message.find(expected) != std::string::npos, "unexpected message: " + message);
    }
  }
  check(message_of([] { require_isa("avx3"); }).find("avx512vnni") != std::string::npos,
        "an unknown name's message does not list the known ones");
}

template <typename Function>
void check_selection(KernelTable<Function> table, Isa limit) {
  check(table.back().isa == Isa::reference, std::string(table.back().name) + " is last, but not portable");
  const KernelRow<Function>& selected = select_kernel(table);
  check(selected.isa <= limit, std::string(selected.name) + " exceeds CHUNKRT_FORCE_ISA");
  for (const KernelRow<Function>& row : table) {
    check(row.is_built() == (row.function != nullptr && is_built(row.isa)),
          std::string(row.name) + " and its instruction set disagree on being built");
    const bool is_usable = row.is_built() && row.is_supported() && row.isa <= limit;
    check(!is_usable || row.isa <= selected.isa, std::string(row.name) + " is better than what was selected");
  }
}

void check_all_selections(Isa limit) {
  check_selection(gemm_f32_s8row_s8col_table(), limit);
  check_selection(quantize_s8row_f32_table(), limit);
  check_selection(quantize_s8grid_f32_table(), limit);
  check_selection(rms_norm_f32_f32_table(), limit);
  check_selection(add_f32_f32_f32_table(), limit);
  check_selection(mul_f32_f32_f32_table(), limit);
  check_selection(sigmoid_f32_f32_table(), limit);
  check_selection(silu_mul_f32_f32_f32_table(), limit);
  check_selection(round_to_grid_f32_f32_f32_table(), limit);
  check_selection(widen_f32_f16_table(), limit);
  check_selection(find_outliers_f32_f32_table(), limit);
  check_selection(dequantize_row_f32_s8col_table(), limit);
  check_selection(add_outer_product_f32_f32_f32_table(), limit);
  check_selection(append_cache_f32_table(), limit);
  check_selection(attend_f32_f32_cache_table(), limit);
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
      const std::string message = message_of([] { select_kernel(gemm_f32_s8row_s8col_table()); });
      check(message.starts_with("CHUNKRT_FORCE_ISA"), "unexpected message: " + message);
    }
  }
}

}  // namespace

void test_isa(Suite& suite) {
  suite.run("isa: names and their errors", test_names);
  suite.run("isa: selection and CHUNKRT_FORCE_ISA", test_selection);
}

}  // namespace chunkrt::testing
