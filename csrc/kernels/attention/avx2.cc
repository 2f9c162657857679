// attention with AVX2.
#include "kernels/attention/pack_bytes.h"
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

// vpmaddubsw takes the magnitudes of the columns as its unsigned operand, and the integers of the row with
// the columns' signs. The sum of two products, at most 2 * 127 * 127, fits int16.
struct ByteQuads {
  struct Operand {
    Ints values, magnitudes;
  };
  static constexpr std::size_t kRows = 4, kVectors = 1;
  static constexpr bool kAreBytes = true;

  CHUNKRT_LANES static Operand load(const std::uint16_t* quads) {
    const Ints values = load_ints(quads);
    return {values, CHUNKRT_EACH(Ints, _mm256_abs_epi8, values)};
  }
  CHUNKRT_LANES static Operand broadcast(const std::uint16_t* quad) {
    return {broadcast_word(quad), all_ints(0)};
  }
  CHUNKRT_LANES static Floats add(Operand left, Operand right, Floats sum) {
    const auto products = [](__m256i row, __m256i columns, __m256i magnitudes) {
      const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(row, columns));
      return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    };
    return from_bits(bits_of(sum) + each<Ints>(products, left.values, right.values, right.magnitudes));
  }
  CHUNKRT_LANES static Ints total(Ints sums, std::int32_t) { return sums; }
};

constexpr TileOperations kTileOperations = {.rope = rope,
                                            .widen = widen_f32_f16_avx2,
                                            .dequantize = dequantize,
                                            .round = round_to_bfloat,
                                            .pack_bytes = pack_bytes,
                                            .pack_keys = pack_keys,
                                            .pack_values = pack_values,
                                            .weigh = weigh_rows};

}  // namespace

const TileOperations& tile_operations_avx2() { return kTileOperations; }

void attend_f32_bf16_cache_avx2(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                float* scratch) {
  attend_in_bfloat<PairProducts<FusedPairs>>(args, begin, end, scratch, kTileOperations);
}

void attend_f32_s8_bf16_cache_avx2(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                   float* scratch) {
  attend_in_bfloat<PairProducts<FusedPairs, ByteQuads>>(args, begin, end, scratch, kTileOperations);
}

}  // namespace chunkrt
