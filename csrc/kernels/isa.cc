#include "kernels/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(_M_X64)
#include <intrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace chunkrt {
namespace {

#if defined(__x86_64__) || defined(_M_X64)

constexpr std::string_view kArchitecture = "x86-64";

struct Registers {
  unsigned eax, ebx, ecx, edx;
};

// Clang for Windows defines both __x86_64__ and _M_X64, and has the instructions in GCC's form.
Registers cpuid(unsigned leaf, unsigned subleaf) {
#if !defined(__x86_64__)
  int values[4];
  __cpuidex(values, static_cast<int>(leaf), static_cast<int>(subleaf));
  return {static_cast<unsigned>(values[0]), static_cast<unsigned>(values[1]),
          static_cast<unsigned>(values[2]), static_cast<unsigned>(values[3])};
#else
  Registers r{};
  __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
  return r;
#endif
}

// XCR0: the register states that the operating system saves.
unsigned enabled_states() {
#if !defined(__x86_64__)
  return static_cast<unsigned>(_xgetbv(0));
#else
  unsigned low, high;
  // "volatile" keeps it behind the check of OSXSAVE: processors without AVX lack the instruction.
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
#endif
}

bool is_by_amd() {
  const Registers vendor = cpuid(0, 0);
  return vendor.ebx == 0x68747541 && vendor.edx == 0x69746e65 && vendor.ecx == 0x444d4163;  // AuthenticAMD
}

bool is_fast_if_present(Isa isa) { return isa != Isa::avx512bf16 || is_by_amd(); }

bool all_bits(unsigned value, unsigned bits) { return (value & bits) == bits; }

// Linux provides tiles only to processes that request them before their first tile instruction.
#if defined(__linux__) && defined(__x86_64__)
constexpr bool kHasTileFiles = true;
[[gnu::noinline]] bool are_tiles_allowed() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
constexpr bool kHasTileFiles = false;
bool are_tiles_allowed() { return false; }
#endif

bool has_tiles(Isa isa) { return isa == Isa::amx || isa == Isa::amx_bf16; }

bool is_allowed(Isa isa) { return !has_tiles(isa) || are_tiles_allowed(); }

bool detect(Isa isa) {
  constexpr unsigned kOsxsave = 1u << 27, kFma = 1u << 12, kF16c = 1u << 29;              // leaf 1 ecx
  constexpr unsigned kAvx2 = 1u << 5;                                                     // leaf 7 ebx
  constexpr unsigned kAvx512FDqBwVl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // leaf 7 ebx
  constexpr unsigned kAvx512Vnni = 1u << 11;                                              // leaf 7 ecx
  constexpr unsigned kAvxVnni = 1u << 4;                                                  // leaf 7.1 eax
  constexpr unsigned kAmxTileInt8 = (1u << 24) | (1u << 25), kAmxBf16 = 1u << 22;         // leaf 7 edx
  constexpr unsigned kAvx512Bf16 = 1u << 5;                                               // leaf 7.1 eax
  constexpr unsigned kYmmState = 0x6, kZmmState = 0xe6;                                   // XCR0
  if (cpuid(0, 0).eax < 7 || !all_bits(cpuid(1, 0).ecx, kOsxsave | kFma | kF16c)) return false;
  const Registers features = cpuid(7, 0);
  const bool avx2 = all_bits(enabled_states(), kYmmState) && all_bits(features.ebx, kAvx2);
  if (isa == Isa::avx2) return avx2;
  // The highest subleaf of leaf 7 is in subleaf 0.
  if (isa == Isa::avxvnni) return avx2 && features.eax >= 1 && all_bits(cpuid(7, 1).eax, kAvxVnni);
  const bool avx512vnni = avx2 && all_bits(enabled_states(), kZmmState) &&
                          all_bits(features.ebx, kAvx512FDqBwVl) && all_bits(features.ecx, kAvx512Vnni);
  if (isa == Isa::avx512vnni) return avx512vnni;
  if (isa == Isa::avx512bf16) {
    return avx512vnni && features.eax >= 1 && all_bits(cpuid(7, 1).eax, kAvx512Bf16);
  }
  const bool amx = avx512vnni && all_bits(features.edx, kAmxTileInt8);
  if (isa == Isa::amx) return amx;
  return isa == Isa::amx_bf16 && amx && all_bits(features.edx, kAmxBf16);
}

bool built(Isa isa) {
  return isa == Isa::avx2 || isa == Isa::avxvnni || isa == Isa::avx512vnni || isa == Isa::avx512bf16 ||
         (has_tiles(isa) && kHasTileFiles);
}

#elif defined(__aarch64__) || defined(_M_ARM64)

constexpr std::string_view kArchitecture = "aarch64";

#if defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  std::size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
bool has_bf16() { return has_feature("hw.optional.arm.FEAT_BF16"); }
#elif defined(_WIN32)
// The features that all processors have, by the registry's copies of ID_AA64ISAR1_EL1. The name of such a
// value is CP and the register's number: (op0 & 1) << 14 | op1 << 11 | CRn << 7 | CRm << 3 | op2.
ArmFeatures registered_features() {
  const std::string processors = "HARDWARE\\DESCRIPTION\\System\\CentralProcessor\\";
  ArmFeatures common{.has_i8mm = true, .has_bf16 = true};
  for (int index = 0;; ++index) {
    std::uint64_t value = 0;
    DWORD size = sizeof(value);
    const std::string key = processors + std::to_string(index);
    if (RegGetValueA(HKEY_LOCAL_MACHINE, key.c_str(), "CP 4031", RRF_RT_REG_QWORD, nullptr, &value, &size) !=
        0) {
      return index > 0 ? common : ArmFeatures{};
    }
    const ArmFeatures own = decode_id_aa64isar1(value);
    common.has_i8mm = common.has_i8mm && own.has_i8mm;
    common.has_bf16 = common.has_bf16 && own.has_bf16;
  }
}

// Older versions of Windows do not know the features 66 and 68, so false does not mean that they are missing.
bool has_dotprod() { return IsProcessorFeaturePresent(43) != 0; }  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
bool has_i8mm() {                                                  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
  return IsProcessorFeaturePresent(66) != 0 || registered_features().has_i8mm;
}
bool has_bf16() {  // PF_ARM_V86_BF16_INSTRUCTIONS_AVAILABLE
  return IsProcessorFeaturePresent(68) != 0 || registered_features().has_bf16;
}
#else
bool has_dotprod() { return (getauxval(AT_HWCAP) & (1ul << 20)) != 0; }  // HWCAP_ASIMDDP
bool has_i8mm() { return (getauxval(AT_HWCAP2) & (1ul << 13)) != 0; }    // HWCAP2_I8MM
bool has_bf16() { return (getauxval(AT_HWCAP2) & (1ul << 14)) != 0; }    // HWCAP2_BF16
#endif

bool detect(Isa isa) {
  if (isa == Isa::neon) return true;
  if (isa == Isa::neon_dotprod) return has_dotprod();
  if (isa == Isa::neon_i8mm) return has_dotprod() && has_i8mm();
  return isa == Isa::neon_bf16 && has_bf16() && has_i8mm();
}

#if defined(_MSC_VER) && !defined(__clang__)
constexpr bool kHasBfloatFiles = false;
#else
constexpr bool kHasBfloatFiles = true;
#endif

bool built(Isa isa) {
  return isa == Isa::neon || isa == Isa::neon_dotprod || isa == Isa::neon_i8mm ||
         (isa == Isa::neon_bf16 && kHasBfloatFiles);
}
bool is_allowed(Isa) { return true; }
#if defined(__APPLE__)
bool is_fast_if_present(Isa isa) { return isa != Isa::neon_bf16; }
#else
bool is_fast_if_present(Isa) { return true; }
#endif

#else

constexpr std::string_view kArchitecture = "another architecture";

bool detect(Isa) { return false; }
bool built(Isa) { return false; }
bool is_allowed(Isa) { return true; }
bool is_fast_if_present(Isa) { return true; }

#endif

constexpr std::array<std::string_view, kAllIsas.size()> kNames = {
    "reference", "neon",       "neon_dotprod", "neon_i8mm", "neon_bf16", "avx2",
    "avxvnni",   "avx512vnni", "avx512bf16",   "amx",       "amx_bf16"};

// Caches the result of `answer` for each instruction set.
std::array<bool, kAllIsas.size()> ask_all(bool (*answer)(Isa)) {
  std::array<bool, kAllIsas.size()> answers{};
  for (const Isa each : kAllIsas) answers[static_cast<std::size_t>(each)] = answer(each);
  return answers;
}

std::string known_names() {
  std::string names;
  for (const Isa isa : kAllIsas) names += (names.empty() ? "" : ", ") + std::string(name_of(isa));
  return names;
}

}  // namespace

std::string_view name_of(Isa isa) { return kNames[static_cast<std::size_t>(isa)]; }

std::string_view architecture() { return kArchitecture; }

bool is_built(Isa isa) { return isa == Isa::reference || built(isa); }

bool is_present(Isa isa) {
  static const auto present = ask_all([](Isa each) { return each == Isa::reference || detect(each); });
  return present[static_cast<std::size_t>(isa)];
}

bool is_supported(Isa isa) {
  static const auto supported = ask_all([](Isa each) { return is_present(each) && is_allowed(each); });
  return supported[static_cast<std::size_t>(isa)];
}

bool is_fast(Isa isa) {
  static const auto fast =
      ask_all([](Isa each) { return each == Isa::reference || is_fast_if_present(each); });
  return fast[static_cast<std::size_t>(isa)];
}

Isa require_isa(std::string_view name) {
  for (const Isa isa : kAllIsas) {
    if (name_of(isa) != name) continue;
    if (!is_built(isa)) {
      throw std::invalid_argument("the " + std::string(name) + " kernels are not built: this binary is for " +
                                  std::string(kArchitecture));
    }
    if (!is_present(isa)) {
      throw std::invalid_argument("this processor does not support " + std::string(name) +
                                  ": its kernels are built, but cannot run here");
    }
    if (!is_supported(isa)) {
      throw std::invalid_argument("the operating system does not allow " + std::string(name) +
                                  ", which this processor has: its kernels are built, but cannot run here");
    }
    return isa;
  }
  throw std::invalid_argument("unknown instruction set '" + std::string(name) +
                              "'; there are: " + known_names());
}

Isa selection_limit() {
  const char* forced = std::getenv("CHUNKRT_FORCE_ISA");
  if (forced == nullptr || *forced == '\0') return kAllIsas.back();
  try {
    return require_isa(forced);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("CHUNKRT_FORCE_ISA: ") + error.what());
  }
}

}  // namespace chunkrt
