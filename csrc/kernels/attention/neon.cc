// attention with NEON.
#include "kernels/attention/pack_bytes.h"
#include "kernels/attention/pair_products.h"
#include "kernels/attention/round_bfloat.h"
#include "kernels/attention/tiles.h"
#include "kernels/attention/weigh_rows.h"

namespace chunkrt {
namespace {

// Arranges the pairs of dimensions of four keys by keys: a 4 by 4 transposition of 32-bit pairs.
void pack_keys(const float* keys, std::size_t depth, std::uint16_t* out) {
  for (std::size_t d = 0; d < depth; d += 8, out += 4 * kDepthPerTile) {
    for (std::size_t key = 0; key < kRowsPerTile; key += 4) {
      alignas(16) std::uint16_t rounded[4][8];
      const float* rows[4];
      for (std::size_t i = 0; i < 4; ++i) {
        round_plainly(keys + (key + i) * depth + d, rounded[i], 8);
        rows[i] = reinterpret_cast<const float*>(rounded[i]);
      }
      transpose(rows, 0, 4, reinterpret_cast<float*>(out + key * 2), kDepthPerTile / 2);
    }
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
      uint16x8x2_t low, high;
      low.val[0] = upper_halves(first.of[0], first.of[1]);
      low.val[1] = upper_halves(second.of[0], second.of[1]);
      high.val[0] = upper_halves(first.of[2], first.of[3]);
      high.val[1] = upper_halves(second.of[2], second.of[3]);
      vst2q_u16(out + d * kKeysPerBlock, low);
      vst2q_u16(out + d * kKeysPerBlock + kRowsPerTile, high);
    }
  }
  return largest(most) < 0x7f800000;
}

// Products of four int8, as two sums of products in int16 that are added in int32.
struct ByteQuads {
  using Operand = Ints;
  static constexpr std::size_t kRows = 4, kVectors = 1;
  static constexpr bool kAreBytes = true;

  CHUNKRT_LANES static Operand load(const std::uint16_t* quads) { return load_ints(quads); }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* quad) { return broadcast_word(quad); }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    const auto products = [](int32x4_t row, int32x4_t columns, int32x4_t sums) {
      const int8x16_t x = vreinterpretq_s8_s32(row), y = vreinterpretq_s8_s32(columns);
      const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
      const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(x), vget_high_s8(y)));
      return vaddq_s32(sums, vpaddq_s32(low, high));
    };
    return from_bits(each<Ints>(products, left, right, bits_of(sum)));
  }
  CHUNKRT_LANES static Ints total(Ints sums, std::int32_t) { return sums; }
};

constexpr TileOperations kTileOperations = {.rope = rope,
                                            .widen = widen_f32_f16_neon,
                                            .dequantize = dequantize,
                                            .round = round_to_bfloat,
                                            .pack_bytes = pack_bytes,
                                            .pack_keys = pack_keys,
                                            .pack_values = pack_values,
                                            .weigh = weigh_rows};

}  // namespace

const TileOperations& tile_operations_neon() { return kTileOperations; }

void attend_f32_bf16_cache_neon(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                float* scratch) {
  attend_in_bfloat<PairProducts<FusedPairs>>(args, begin, end, scratch, kTileOperations);
}

void attend_f32_s8_bf16_cache_neon(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                   float* scratch) {
  attend_in_bfloat<PairProducts<FusedPairs, ByteQuads>>(args, begin, end, scratch, kTileOperations);
}

}  // namespace chunkrt
