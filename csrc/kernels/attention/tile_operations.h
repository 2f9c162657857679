// The parts of bfloat16 attention other than tile products: the layout of operands in scratch, and the
// operations that an instruction set provides.
//
// A bfloat16 is the upper half of a float32's bits, kept as uint16.
#pragma once

#include "kernels/attention/int8_cache.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/tiled_cache.h"
#include "kernels/elementwise/elementwise.h"

namespace chunkrt {

inline constexpr std::size_t kRowsPerTile = 16;     // and columns of a product
inline constexpr std::size_t kDepthPerTile = 32;    // bfloat16 in a row of 64 bytes
inline constexpr std::size_t kValuesPerTile = 512;  // bfloat16
inline constexpr std::size_t kMostRowsAtOnce = 3 * kRowsPerTile;
static_assert(kKeysPerBlock % kDepthPerTile == 0);

// Layout of an item's operands in scratch. The operands are adjacent, and the size of each is a multiple of
// 64 bytes.
struct TileSizes {
  std::size_t depth;    // depth of the scores' products: head_dim rounded up to tiles
  std::size_t columns;  // columns of the output: head_dim rounded up to tiles
  // In floats; each holds two bfloat16.
  std::size_t queries;  // bfloat16 [queries, depth]
  std::size_t keys;     // bfloat16 [4, depth / 2, 16 keys, 2]
  std::size_t values;   // bfloat16 [columns / 16, 32, 16 columns, 2 keys]
  std::size_t weights;  // bfloat16 [rows, keys]
  std::size_t outs;     // float32 [queries, columns]
  std::size_t rows;     // float32 [16, depth]
  std::size_t scores;   // float32 [rows, keys]
};

TileSizes tile_sizes(std::size_t head_dim);

// Number of elements of a row that scores in int8 mix: the largest power of two that divides `depth`.
constexpr std::size_t num_mixed(std::size_t depth) { return depth & (~depth + 1); }

// Arguments for the conversion of rows of scores to weights.
struct ScoredRows {
  float* scores;           // [rows, kKeysPerBlock]; scores of invisible keys are unspecified and overwritten
  std::uint16_t* weights;  // [rows, kKeysPerBlock]: bfloat16, 0 for invisible keys
  float* outs;             // [rows, columns]: o of attention.h, multiplied by a
  float* maxima;           // [rows]: m
  float* sums;             // [rows]: l
  const std::size_t* first;    // [rows]: a row attends to the block's keys from `first`
  const std::size_t* visible;  // to before `visible`; if the range is empty, the row is unchanged
  bool is_whole;               // true only if every row sees all keys of the block
  std::size_t num_rows;
  std::size_t columns;
  float soft_cap;  // bound of scores; 0: none
};

// A row of int8 integers, as it is stored in place of a row of `depth` bfloat16.
struct ByteRow {
  std::int8_t* values;  // [depth]
  float* scale;
  std::int32_t* sum;  // sum of the integers

  ByteRow(std::uint16_t* row, std::size_t depth)
      : values(reinterpret_cast<std::int8_t*>(row)),
        scale(reinterpret_cast<float*>(values + depth)),
        sum(reinterpret_cast<std::int32_t*>(scale + 1)) {}
};

struct TileOperations {
  // Ropes one head and multiplies it by `scale`; `out` may be `input`.
  void (*rope)(const float* input, const float* cos, const float* sin, std::size_t head_dim,
               std::size_t rotary_dim, float scale, float* out);
  WidenFunction* widen;
  DequantizeFunction* dequantize;
  RoundFunction* round;  // `count` is a multiple of 16
  // Multiplies each num_mixed(depth) elements of a row by a Hadamard matrix, and stores the result as a
  // ByteRow, quantised like a row of quantize_s8row. `row` is overwritten.
  void (*pack_bytes)(float* row, std::size_t depth, std::uint16_t* out);
  // Packs 16 keys [16, depth] as adjacent tiles, bfloat16 [depth / 2, 16 keys, 2].
  void (*pack_keys)(const float* keys, std::size_t depth, std::uint16_t* out);
  // Packs 16 rows of values, `stride` floats apart, into a quarter of the tiles of each 16 columns, bfloat16
  // [8, 16 columns, 2 keys]. Returns true if all values are finite after rounding.
  bool (*pack_values)(const float* values, std::size_t stride, std::size_t columns, std::uint16_t* out);
  void (*weigh)(const ScoredRows& rows);
};

#if defined(__aarch64__) || defined(_M_ARM64)
const TileOperations& tile_operations_neon();
#endif

#if defined(__x86_64__) || defined(_M_X64)
const TileOperations& tile_operations_avx2();
TileOperations tile_operations_avx512vnni();  // bit-identical to those of AVX2
TileOperations tile_operations_avx512bf16();  // `weigh` and `round` differ within the bounds of attention.h
#endif

// The fastest operations that this processor supports.
const TileOperations& tile_operations();

}  // namespace chunkrt
