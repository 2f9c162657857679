// attention in bfloat16 with AVX-512: VDPBF16PS adds the products of 16 pairs to 16 sums.
#include "kernels/attention/pair_products.h"
#include "kernels/attention/tiles.h"
#include "kernels/list.h"

namespace chunkrt {
namespace {

// One instruction adds both products of a pair, and treats subnormal numbers as 0.
struct DotPairs {
  using Operand = Ints;
  static constexpr std::size_t kRows = 6, kVectors = 4;  // 24 of 32 registers

  CHUNKRT_LANES static Operand load(const std::uint16_t* pairs) { return load_ints(pairs); }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* pair) {
    int both;
    std::memcpy(&both, pair, sizeof(both));
    return all_ints(both);
  }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    return {_mm512_dpbf16_ps(sum.of, std::bit_cast<__m512bh>(right.of), std::bit_cast<__m512bh>(left.of))};
  }
};

}  // namespace

void attend_f32_bf16_cache_avx512bf16(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                      float* scratch) {
  static const TileOperations operations = tile_operations_avx512vnni();
  attend_in_bfloat<PairProducts<DotPairs>>(args, begin, end, scratch, operations);
}

}  // namespace chunkrt
