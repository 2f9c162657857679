// attention with AVX2.
#include "kernels/attention/pair_products.h"
#include "kernels/attention/tiles.h"
#include "kernels/attention/weigh_rows.h"

namespace chunkrt {
namespace {

// Arranges sixteen dimensions of eight keys by pairs: an 8 by 8 transposition of 32-bit pairs.
void pack_eight_keys(const float* keys, std::size_t depth, std::uint16_t* out) {
  __m256 rows[8];
  for (std::size_t i = 0; i < 8; ++i)
    rows[i] = _mm256_castsi256_ps(upper_halves(to_bfloats(load(keys + i * depth))));
  transpose_registers(rows);
  for (std::size_t i = 0; i < 8; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * kDepthPerTile), _mm256_castps_si256(rows[i]));
  }
}

void pack_keys(const float* keys, std::size_t depth, std::uint16_t* out) {
  for (std::size_t d = 0; d < depth; d += 16, out += 8 * kDepthPerTile) {
    pack_eight_keys(keys + d, depth, out);
    pack_eight_keys(keys + 8 * depth + d, depth, out + kDepthPerTile / 2);
  }
}

bool pack_values(const float* values, std::size_t stride, std::size_t columns, std::uint16_t* out) {
  const Ints magnitude = all_ints(0x7fffffff);
  Ints most = all_ints(0);
  for (std::size_t key = 0; key < kRowsPerTile; key += 2, out += kDepthPerTile) {
    const float* const row = values + key * stride;
    for (std::size_t d = 0; d < columns; d += kLanes) {
      const Ints first = to_bfloats(load(row + d)), second = to_bfloats(load(row + stride + d));
      most = max(most, max(first & magnitude, second & magnitude));
      auto* const pairs = reinterpret_cast<__m256i*>(out + d * kKeysPerBlock);
      _mm256_storeu_si256(pairs, _mm256_blend_epi16(_mm256_srli_epi32(first.low, 16), second.low, 0xaa));
      _mm256_storeu_si256(pairs + 1,
                          _mm256_blend_epi16(_mm256_srli_epi32(first.high, 16), second.high, 0xaa));
    }
  }
  return largest(most) < 0x7f800000;
}

constexpr TileOperations kTileOperations = {.rope = rope,
                                            .widen = widen_f32_f16_avx2,
                                            .dequantize = dequantize,
                                            .round = round_to_bfloat,
                                            .pack_keys = pack_keys,
                                            .pack_values = pack_values,
                                            .weigh = weigh_rows};

}  // namespace

const TileOperations& tile_operations_avx2() { return kTileOperations; }

void attend_f32_bf16_cache_avx2(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                float* scratch) {
  attend_in_bfloat<PairProducts<FusedPairs>>(args, begin, end, scratch, kTileOperations);
}

}  // namespace chunkrt
