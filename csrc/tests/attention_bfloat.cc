#include "tests/attention_bfloat.h"

#include "kernels/dispatch.h"
#if defined(__linux__) && defined(__x86_64__)
#include "tests/tile_traps.h"
#endif

namespace chunkrt::testing {
namespace {

#if defined(__linux__) && defined(__x86_64__)
// The compiled kernel, with trapped tile instructions.
void attend_by_trapped_tiles(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch) {
  const TileTraps traps;
  attend_f32_bf16_cache_amx_bf16(args, begin, end, scratch);
}
#endif

}  // namespace

void run_in_bfloat(Suite& suite, const std::string& name, void (*test)(const Kernels&)) {
  const auto kernels = [](AttentionFunction* attend, bool are_caught = false) {
    return Kernels{append_cache_f32_reference, attend, AttentionMath::bfloat16, are_caught};
  };
  suite.run_rows(attend_f32_bf16_cache, name, [&](AttentionFunction* attend) { test(kernels(attend)); });
#if defined(__linux__) && defined(__x86_64__)
  // AVX2 instructions are not trapped.
  if (is_supported(Isa::avx2) && !is_present(Isa::amx)) {
    suite.run("attend_f32_bf16_cache_amx_bf16, trapped tiles: " + name,
              [&] { test(kernels(attend_by_trapped_tiles, true)); });
  }
#endif
}

}  // namespace chunkrt::testing
