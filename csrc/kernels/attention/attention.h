// attention: rotary embedding, append to the KV cache, causal grouped-query attention in one pass over the
// keys.
//
// Two phases with a barrier between them: `append` ropes the keys of rows and writes keys and values to the
// caches; `attend` ropes the queries and computes the output. Row t stands at position p = position + t, its
// key and value go to slot p % capacity, and it sees the keys j with p - window < j <= p, or 0..p without a
// window.
//
// Rotary embedding (rotate-half), h = rotary_dim / 2, c and s row table_row - position + p of the tables;
// dimensions from rotary_dim on pass through:
//   y[i] = fma(x[i], c[i], -(x[i + h] * s[i])),  y[i + h] = fma(x[i + h], c[i], x[i] * s[i]),  i < h
// A query is then multiplied by `scale`. Raw keys are cached as they come, and `attend` ropes what it reads
// of them: on float32 caches the same bits, as long as table_row - position stays the same.
//
// A float16 cache rounds to nearest even, and past 65504 to infinity. An int8 cache holds for each row of
// head_dim values the int8 of quantize.h, each 32 of them from a multiple of 32 on being a row of
// quantize_s8row (the last may be shorter), then the bytes of the float32 scales of these groups; an element
// read from it is float(q) * scale, rounded once. With `key_bias` it holds of a raw key key - key_bias, and
// what is read is fma(float(q), scale, key_bias): a constant that is large in a few channels, as the biases
// of some models are, is then not rounded and makes no scale coarse.
//
// A bfloat16 cache is for AttentionMath::bfloat16, and for keys that are not raw. It rounds to nearest even,
// and past the largest number to infinity, and holds each 64 positions from a multiple of 64 on as the tiles
// that are multiplied (tiles.h), depth being head_dim to a multiple of 32:
//   keys [4, depth / 2, 16 positions, 2 dimensions], values [depth / 16, 32, 16 dimensions, 2 positions]
// Of a position that was appended, dimensions past head_dim are zeros.
//
// Softmax (online, after Milakov and Gimelshein 2018, and FlashAttention, Dao et al. 2022): for each block of
// 64 keys, at absolute positions that are multiples of 64, and each query, with m = -inf, l = 0, o = 0 at
// first:
//   score[j] = the chain fma(q[d], k[j][d], score[j]) over d ascending from 0, for the keys j that are seen
//   m' = max(m, max score),  a = e(m - m'),  w[j] = e(score[j] - m')
//   l = fma(l, a, sum w),  o[d] = the chain fma(w[j], v[j][d], o[d]) over j ascending from o[d] * a
// and at last out[d] = o[d] * (1 / l). A key that is not seen, before the window or past p, is not there: it
// enters neither maximum nor chains, and a block of which nothing is seen is skipped. The sum has 16 partial
// sums, lane i adding w[i], w[i + 16], ... of the block's keys that are seen, folded as in norm.h. e(x) is 0
// for x < -87, else exp as elementwise.h defines it.
//
// Numerics of AttentionMath::float32: float32 throughout. Each row's arithmetic is the one above whatever
// stands beside it, so the bits depend neither on the split of the work, nor on the chunking of the prompt,
// nor on the instruction set. Weights below e^-87 count as 0. A NaN or an infinity in a row reaches that
// row's output and, through the caches, the rows after it that see it, no others.
//
// Numerics of AttentionMath::bfloat16: what is multiplied is rounded to bfloat16, to nearest even, and past
// its largest number to infinity: each element of a query, once it is roped and multiplied by `scale`; each
// element of keys and values, as it is read from the cache or, of bfloat16, as it is appended, and of a raw
// key as it is roped; and each weight w[j], before it enters l and o. Products are exact in float32 and
// summed in float32; maxima, e, l and the rescaling are those above, but l's and all other sums are in an
// order of the instruction set's own, and a processor may take what lies below 2^-126 in size for 0 in
// products and their sums. So the bits may differ between instruction sets. On one they depend, as above,
// neither on the split of the work nor on the chunking: a row's sums are its own, over the same blocks, and a
// key that is not seen adds nothing to them. For what is not finite the above holds too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

enum class CacheType { float32, float16, int8, bfloat16 };

// What queries, keys, values and weights are multiplied in; which kernel a call is for.
enum class AttentionMath { float32, bfloat16 };

// Dimensions of one position of one head in a bfloat16 cache.
constexpr std::size_t tiled_depth(std::size_t head_dim) { return (head_dim + 31) / 32 * 32; }

// Values of a row of an int8 cache that share a scale.
constexpr std::size_t kInt8Group = 32;

constexpr std::size_t int8_groups(std::size_t head_dim) { return (head_dim + kInt8Group - 1) / kInt8Group; }

// Bytes of one position of one head in a cache; of bfloat16, a 64th of a block.
constexpr std::size_t cache_row_bytes(CacheType type, std::size_t head_dim) {
  switch (type) {
    case CacheType::float32:
      return head_dim * sizeof(float);
    case CacheType::float16:
      return head_dim * sizeof(std::uint16_t);
    case CacheType::bfloat16:
      return tiled_depth(head_dim) * sizeof(std::uint16_t);
    case CacheType::int8:
      break;
  }
  return head_dim + int8_groups(head_dim) * sizeof(float);
}

struct AttentionArgs {
  const float* qkv;      // float32 [rows, (num_heads + 2 * num_kv_heads) * head_dim]: q | k | v along a row
  const float* cos;      // float32 [context, rotary_dim / 2], context >= table_row + rows
  const float* sin;      // as cos
  void* key_cache;       // [num_kv_heads, capacity, cache_row_bytes]
  void* value_cache;     // as key_cache
  CacheType cache_type;  // float16 is IEEE 754 binary16
  bool has_raw_keys;     // the tables' row table_row - position + j exists for every key j that is seen
  // float32 [num_kv_heads * head_dim] or nullptr: the part of raw keys that an int8 cache leaves out.
  const float* key_bias = nullptr;
  float* out;  // float32 [rows, num_heads * head_dim]; may not overlap qkv
  std::size_t rows;
  std::size_t position;   // of row 0
  std::size_t table_row;  // of cos and sin, for row 0
  // Slots of the caches: position + rows or more. Fewer are a ring, which needs a window, and of slots a
  // multiple of 64 and window + rows - 1 or more. Those of a bfloat16 cache always are a multiple of 64.
  std::size_t capacity;
  std::size_t window;     // 0: none
  std::size_t num_heads;  // a multiple of num_kv_heads
  std::size_t num_kv_heads;
  std::size_t head_dim;    // any; a multiple of 16 is fastest
  std::size_t rotary_dim;  // even, <= head_dim
  float scale;
  AttentionMath math = AttentionMath::float32;
};

// Floats of scratch that one call of either phase needs; threads that run at once need one each, which is
// fastest where aligned to 64 bytes. Besides, a call uses less than 8 KiB of stack, in bfloat16 20 KiB, and
// allocates nothing.
std::size_t attention_scratch_floats(std::size_t head_dim, AttentionMath math = AttentionMath::float32);

// How many items `attend` splits into; args.math tells of how many queries each. `append` splits into
// args.rows items.
std::size_t attend_items(const AttentionArgs& args);

// Runs items [begin, end) of one phase. `attend_f32_bf16_cache` is for AttentionMath::bfloat16, the others
// are for float32; `append` is the same for both.
using AttentionFunction = void(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch);

}  // namespace chunkrt
