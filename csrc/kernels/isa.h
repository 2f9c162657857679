// Instruction sets: their names, whether this build has them and whether this processor does.
//
// "Built" and "supported" are two facts. A kernel file for another architecture is not compiled, so its
// instruction set is not built; a built one may still be missing on the processor that runs.
#pragma once

#include <array>
#include <string_view>

namespace chunkrt {

// Within one architecture a later one is the better one.
enum class Isa { reference, neon, neon_dotprod, neon_i8mm, avx2, avxvnni, avx512vnni };

inline constexpr std::array kAllIsas = {Isa::reference, Isa::neon,    Isa::neon_dotprod, Isa::neon_i8mm,
                                        Isa::avx2,      Isa::avxvnni, Isa::avx512vnni};

std::string_view name_of(Isa isa);

// Whether kernels for it were compiled into this binary.
bool is_built(Isa isa);

// Whether this processor, and the operating system's context switch, support it.
bool is_supported(Isa isa);

// The instruction set of that name, if it is built and supported.
// Throws std::invalid_argument: unknown name, not built, or not supported (three different messages).
Isa require_isa(std::string_view name);

// The best instruction set that automatic selection may use: CHUNKRT_FORCE_ISA if it is set, else no limit.
// Throws std::invalid_argument as require_isa does.
Isa selection_limit();

// The architecture that this binary was compiled for: "x86-64", "aarch64" or "another architecture".
std::string_view architecture();

}  // namespace chunkrt
