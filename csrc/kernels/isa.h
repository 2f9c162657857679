// Instruction sets: their names, whether this build has them and whether this processor does.
//
// "Built", "present" and "supported" are three facts. A kernel file for another architecture is not compiled,
// so its instruction set is not built; a built one may still be missing on the processor that runs; and
// tiles, of which a thread carries 8 KB, have to be allowed by the operating system.
#pragma once

#include <array>
#include <string_view>

namespace chunkrt {

// Within one architecture a later one is the better one.
enum class Isa { reference, neon, neon_dotprod, neon_i8mm, avx2, avxvnni, avx512vnni, amx, amx_bf16 };

inline constexpr std::array kAllIsas = {Isa::reference,  Isa::neon, Isa::neon_dotprod,
                                        Isa::neon_i8mm,  Isa::avx2, Isa::avxvnni,
                                        Isa::avx512vnni, Isa::amx,  Isa::amx_bf16};

std::string_view name_of(Isa isa);

// Whether kernels for it were compiled into this binary.
bool is_built(Isa isa);

// Whether this processor has it.
bool is_present(Isa isa);

// Whether this processor has it, and the operating system keeps and allows what it needs.
bool is_supported(Isa isa);

// The instruction set of that name, if it is built and supported.
// Throws std::invalid_argument: unknown name, not built, not present, or not allowed (four different
// messages).
Isa require_isa(std::string_view name);

// The best instruction set that automatic selection may use: CHUNKRT_FORCE_ISA if it is set, else no limit.
// Throws std::invalid_argument as require_isa does.
Isa selection_limit();

// The architecture that this binary was compiled for: "x86-64", "aarch64" or "another architecture".
std::string_view architecture();

}  // namespace chunkrt
