#include "peaks.h"

#include <string_view>

#include "kernels/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace chunkrt::roofline {
namespace {

#if defined(__x86_64__)

constexpr const PeakTable* kTables[] = {&kPeaksAvx2, &kPeaksAvxVnni, &kPeaksAvx512Vnni};
constexpr std::size_t kNumTables = 3;

bool has_avxvnni() {
  constexpr unsigned kAvxVnni = 1u << 4;  // leaf 7, subleaf 1, eax
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!is_supported(Isa::avx2) || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || eax < 1)
    return false;
  __cpuid_count(7, 1, eax, ebx, ecx, edx);
  return (eax & kAvxVnni) != 0;
}

#elif defined(__aarch64__)

constexpr const PeakTable* kTables[] = {&kPeaksNeon, &kPeaksNeonDotprod, &kPeaksNeonI8mm};
constexpr std::size_t kNumTables = 3;

bool has_avxvnni() { return false; }

#else

constexpr const PeakTable* const* kTables = nullptr;
constexpr std::size_t kNumTables = 0;

bool has_avxvnni() { return false; }

#endif

// For processors that chunkrt has no vector kernels for.
void read_words(const char* data, std::size_t bytes) {
  unsigned long long sum = 0;
  for (std::size_t i = 0; i < bytes; i += sizeof(sum)) {
    unsigned long long word;
    __builtin_memcpy(&word, data + i, sizeof(word));
    sum ^= word;
  }
  asm volatile("" : "+r"(sum));
}

}  // namespace

PeakTables built_peaks() { return {kTables, kNumTables}; }

bool is_supported(const PeakTable& table) {
  const std::string_view name = table.isa;
  for (const Isa isa : kAllIsas) {
    if (name_of(isa) == name) return chunkrt::is_supported(isa);
  }
  return name == "avxvnni" && has_avxvnni();
}

ReadFunction* widest_read() {
  ReadFunction* widest = read_words;
  for (std::size_t i = 0; i < kNumTables; ++i) {
    if (kTables[i]->read != nullptr && is_supported(*kTables[i])) widest = kTables[i]->read;
  }
  return widest;
}

}  // namespace chunkrt::roofline
