#include "peaks.h"

#include <string_view>

#include "kernels/isa.h"

namespace chunkrt::roofline {
namespace {

#if defined(__x86_64__) && defined(__linux__)

constexpr const PeakTable* kTables[] = {&kPeaksAvx2,       &kPeaksAvxVnni, &kPeaksAvx512Vnni,
                                        &kPeaksAvx512Bf16, &kPeaksAmx,     &kPeaksAmxBf16};
constexpr std::size_t kNumTables = 6;

#elif defined(__x86_64__)

constexpr const PeakTable* kTables[] = {&kPeaksAvx2, &kPeaksAvxVnni, &kPeaksAvx512Vnni, &kPeaksAvx512Bf16};
constexpr std::size_t kNumTables = 4;

#elif defined(__aarch64__)

constexpr const PeakTable* kTables[] = {&kPeaksNeon, &kPeaksNeonDotprod, &kPeaksNeonI8mm, &kPeaksNeonBf16};
constexpr std::size_t kNumTables = 4;

#else

constexpr const PeakTable* const* kTables = nullptr;
constexpr std::size_t kNumTables = 0;

#endif

// For processors without vector kernels of chunkrt.
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
  return false;
}

ReadFunction* widest_read() {
  ReadFunction* widest = read_words;
  for (std::size_t i = 0; i < kNumTables; ++i) {
    if (kTables[i]->read != nullptr && is_supported(*kTables[i])) widest = kTables[i]->read;
  }
  return widest;
}

}  // namespace chunkrt::roofline
