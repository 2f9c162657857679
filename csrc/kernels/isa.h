// Instruction sets: their names, and their availability in this build and on this processor.
//
// "Built", "present" and "supported" are distinct. A kernel file for another architecture is not compiled, so
// its instruction set is not built. A built instruction set may still be missing on the processor. The
// operating system has to allow tiles, whose state takes 8 KB in each thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace chunkrt {

// Within one architecture, a later instruction set is better.
enum class Isa {
  reference,
  neon,
  neon_dotprod,
  neon_i8mm,
  neon_bf16,
  avx2,
  avxvnni,
  avx512vnni,
  avx512bf16,
  amx,
  amx_bf16
};

inline constexpr std::array kAllIsas = {Isa::reference,  Isa::neon, Isa::neon_dotprod, Isa::neon_i8mm,
                                        Isa::neon_bf16,  Isa::avx2, Isa::avxvnni,      Isa::avx512vnni,
                                        Isa::avx512bf16, Isa::amx,  Isa::amx_bf16};

std::string_view name_of(Isa isa);

// True if kernels for the instruction set were compiled into this binary.
bool is_built(Isa isa);

// True if this processor has the instruction set.
bool is_present(Isa isa);

// True if this processor has the instruction set, and the operating system allows it and saves its state.
bool is_supported(Isa isa);

// True if the kernels of a supported instruction set are faster here than those of the sets before it. False
// only for
// - avx512bf16 on processors that are not AMD's: on Sapphire Rapids, VDPBF16PS was measured at half the
//   multiply-adds per second of float32, on Zen 4 at twice
// - neon_bf16 on Apple's processors, for which there is neither a measurement nor a published throughput of
//   bfmmla. The analyser predicts 1.8 (Oryon) to 3.2 times the multiply-adds of float32 (bench/RESULTS.md).
bool is_fast(Isa isa);

// Returns the instruction set of that name. Throws std::invalid_argument if the name is unknown, or the
// instruction set is not built, not present, or not allowed (four different messages).
Isa require_isa(std::string_view name);

// The best instruction set that automatic selection may use: CHUNKRT_FORCE_ISA if it is set, otherwise no
// limit. Throws std::invalid_argument under the same conditions as require_isa.
Isa selection_limit();

// Features of a 64-bit Arm processor that its register ID_AA64ISAR1_EL1 describes. Source: Arm Architecture
// Reference Manual for A-profile, D24.2: I8MM in bits 52 to 55, BF16 in bits 44 to 47; 0 if the processor has
// no such instructions. Windows keeps a copy of the register in its registry.
struct ArmFeatures {
  bool has_i8mm, has_bf16;
};
constexpr ArmFeatures decode_id_aa64isar1(std::uint64_t value) {
  return {.has_i8mm = ((value >> 52) & 0xf) != 0, .has_bf16 = ((value >> 44) & 0xf) != 0};
}

// The architecture that this binary was compiled for: "x86-64", "aarch64" or "another architecture".
std::string_view architecture();

}  // namespace chunkrt
