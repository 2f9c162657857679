// attention: rotary embedding, append to the KV cache, causal grouped-query attention in one pass over the
// keys.
//
// The kernel has two phases with a barrier between them. `append` applies the rotary embedding to the keys of
// new rows ("ropes" them) and writes keys and values to the caches; `attend` ropes the queries and computes
// the output. Row t is at position p = position + t. Its key and value are stored in slot p % capacity, and
// it attends to the keys j with p - window < j <= p, or 0..p without a window.
//
// Rotary embedding (rotate-half), where h = rotary_dim / 2, c and s are row table_row - position + p of the
// tables, and dimensions from rotary_dim on are copied:
//   y[i] = fma(x[i], c[i], -(x[i + h] * s[i])),  y[i + h] = fma(x[i + h], c[i], x[i] * s[i]),  i < h
// A query is then multiplied by `scale`. Raw keys are cached unroped, and `attend` ropes the keys that it
// reads. On float32 caches the result is bit-identical to that of roped keys, as long as table_row - position
// stays constant.
//
// With dual chunks (An et al., Training-Free Long-Context Scaling of Large Language Models, 2024), a key at
// position j uses the row j mod period of the tables, regardless of table_row. A query at position p uses
//   the row p mod period for keys of its own chunk of `period` positions,
//   the row min(p mod period + period, limit) for keys of the chunk before, and
//   the row min(2 period - 1, limit) for keys of earlier chunks.
// With `long_from`, the query and the key of position p are multiplied by max(1, 1 + 0.1 ln(n / long_from))
// after the rotation, where n = max(p + 1, table_row - position), computed in float64 and rounded to float32
// (for a query the product with `scale` is rounded to float32).
//
// A float16 cache rounds to nearest even; values that round past 65504 become infinite. An int8 cache stores
// each row of head_dim values in groups of 32 (the last group may be shorter). Each group is quantised like a
// row of quantize_s8row; the float32 scales of the groups follow the int8 values. An element that is read
// from the cache is float(q) * scale, rounded once. With `key_bias` the cache stores key - key_bias of a raw
// key, and reads fma(float(q), scale, key_bias). A bias that is large in a few channels, as in some models,
// is then neither rounded nor makes the scales coarse.
//
// A bfloat16 cache requires AttentionMath::bfloat16 or int8, and keys that are not raw. It rounds to nearest
// even, and past the largest number to infinity, except keys with AttentionMath::int8. It stores each block
// of 64 positions, aligned to a multiple of 64, as the tiles that are multiplied (tiles.h), where depth is
// head_dim rounded up to a multiple of 32:
//   keys [4, depth / 2, 16 positions, 2 dimensions], values [depth / 16, 32, 16 dimensions, 2 positions]
// Dimensions past head_dim of an appended position are zeros.
//
// Softmax (online, after Milakov and Gimelshein 2018, and FlashAttention, Dao et al. 2022): for each query,
// initially with m = -inf, l = 0, o = 0, and for each block of 64 keys that starts at an absolute position
// that is a multiple of 64 (with dual chunks, the keys of a block before and after the boundary of a chunk
// are two blocks):
//   score[j] = the chain fma(q[d], k[j][d], score[j]) over d ascending from 0, for visible keys j
//   with a soft cap: score[j] = tanh(score[j] * (1 / soft_cap)) * soft_cap, with tanh as in elementwise.h
//   m' = max(m, max score),  a = e(m - m'),  w[j] = e(score[j] - m')
//   l = fma(l, a, sum w),  o[d] = the chain fma(w[j], v[j][d], o[d]) over j ascending from o[d] * a
// and at last out[d] = o[d] * (1 / l). A key outside the window or past p is invisible: it enters neither the
// maximum nor the chains, and a block without visible keys is skipped. The sum of weights has 16 partial
// sums, where lane i adds w[i], w[i + 16], ... of the block's visible keys; they are reduced as in norm.h.
// e(x) is 0 for x < -87, otherwise exp(x) as defined in elementwise.h. With sinks, a head begins with m = its
// sink and l = 1: the sink is a score, without scale and cap, of a key whose value is 0.
//
// Numerics of AttentionMath::float32: all arithmetic is in float32. Each row is computed independently of the
// other rows, so the result depends neither on the split of the work, nor on the chunking of the prompt, nor
// on the instruction set. A soft cap adds an error below 2^-20 of a score (two roundings of the argument, 2.5
// units of tanh and a product). Weights below e^-87 count as 0. A NaN or an infinity in a row affects the
// output of that row and, through the caches, that of later rows that attend to it, but no other rows.
//
// Numerics of AttentionMath::bfloat16: factors are rounded to bfloat16, to nearest even, and past its
// largest number to infinity: each element of a query, after RoPE and the multiplication by `scale`; each
// element of keys and values, on reading from the cache, or on appending to a bfloat16 cache, and of a raw
// key after RoPE; and each weight w[j], before it enters l and o. Products are exact in float32 and summed
// in float32; maxima, e, l and the rescaling are computed as above, but the sums, including that of l,
// have an order specific to the instruction set, the e of a weight may have a relative error of up to
// 2^-13 instead, a 32nd of its rounding, and a processor may flush values below 2^-126 to 0 in products
// and their sums. So results may differ between instruction sets. On one instruction set they depend
// neither on the split of the work nor on the chunking: each row has its own sums, over the same blocks,
// and an invisible key adds nothing to them. Non-finite values behave as in float32.
//
// Numerics of AttentionMath::int8: it requires a bfloat16 cache. Weights and values are as in bfloat16, but
// scores are products of int8 integers, after the idea of SageAttention (Zhang et al., 2024). Each roped key,
// and each roped query times `scale`, is extended by zeros to `depth` elements and multiplied by a Hadamard
// matrix, which spreads large elements over the others and preserves products up to a factor (pack_bytes, in
// tile_operations.h). It is then quantised like a row of quantize_s8row. With q and k the integers,
//   score[j] = (float(sum of q[d] * k[j][d]) * key_scale[j]) * (query_scale / number of mixed elements)
// Sums of integers are exact, so scores are the same on all instruction sets. If an element of a key or a
// query is not finite, the scores with it are NaN. A block of 64 positions stores the keys [4, depth / 2, 16
// positions, 4 bytes]: along the second axis depth / 4 rows of 4 integers for each position, a row of their
// float32 scales, and unused rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chunkrt {

enum class CacheType { float32, float16, int8, bfloat16 };

// The number format of the products of queries, keys, values and weights; it selects the kernel.
enum class AttentionMath { float32, bfloat16, int8 };

// Number of dimensions that one position of one head takes in a bfloat16 cache.
constexpr std::size_t tiled_depth(std::size_t head_dim) { return (head_dim + 31) / 32 * 32; }

// A bfloat16 cache is appended to fastest by pieces that begin at a multiple of this position.
inline constexpr std::size_t kPositionsTogether = 16;

// Number of values of a row of an int8 cache that share a scale.
constexpr std::size_t kInt8Group = 32;

constexpr std::size_t int8_groups(std::size_t head_dim) { return (head_dim + kInt8Group - 1) / kInt8Group; }

// Bytes of one position of one head in a cache; in a bfloat16 cache this is 1/64 of a block.
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

struct DualChunks {
  std::size_t period = 0;     // 0: no dual chunks
  std::size_t limit = 0;      // at least `period`
  std::size_t long_from = 0;  // 0: no factor
};

struct AttentionArgs {
  // float32 [rows, (num_heads + 2 * num_kv_heads) * head_dim]: q | k | v along a row; if another layer fills
  // the caches, only q.
  const float* qkv;
  // float32 [context, rotary_dim / 2], context >= table_row + rows; with dual chunks context > limit, or
  // context >= position + rows
  const float* cos;
  const float* sin;      // as cos
  void* key_cache;       // [num_kv_heads, capacity, cache_row_bytes]
  void* value_cache;     // as key_cache
  CacheType cache_type;  // float16 is IEEE 754 binary16
  bool has_raw_keys;     // the tables' row table_row - position + j exists for every visible key j
  // float32 [num_kv_heads * head_dim] or nullptr: the bias of raw keys, which an int8 cache does not store.
  const float* key_bias = nullptr;
  float* out;  // float32 [rows, num_heads * head_dim]; may not overlap qkv
  std::size_t rows;
  std::size_t position;   // for row 0
  std::size_t table_row;  // row of cos and sin for row 0; with dual chunks only table_row - position matters
  // Number of slots of the caches, at least position + rows. Fewer slots form a ring buffer, which requires a
  // window; its number of slots is a multiple of 64 and at least window + rows - 1. The number of slots of a
  // bfloat16 cache is always a multiple of 64.
  std::size_t capacity;
  std::size_t window;     // 0: none
  std::size_t num_heads;  // a multiple of num_kv_heads
  std::size_t num_kv_heads;
  std::size_t head_dim;    // any; a multiple of 16 is fastest
  std::size_t rotary_dim;  // even, <= head_dim
  float scale;
  float soft_cap = 0.0f;         // 0: none
  const float* sinks = nullptr;  // float32 [num_heads] or nullptr
  AttentionMath math = AttentionMath::float32;
  // Number of queries per item of `attend`; 0 is the default of `math`. More queries share the work per
  // block, fewer balance the threads; results do not depend on it.
  std::size_t queries_per_item = 0;
  // False if another layer has filled the caches, also for these rows. `append` may not be called.
  bool appends = true;
  DualChunks dual_chunks = {};  // exclude a window
};

// Number of floats of scratch for one call of either phase. Concurrent calls need separate scratch, which is
// fastest if aligned to 64 bytes. In addition, a call uses less than 8 KiB of stack (20 KiB in bfloat16), and
// allocates no memory.
std::size_t attention_scratch_floats(std::size_t head_dim, AttentionMath math = AttentionMath::float32);

// Number of items of `attend`. `append` has args.rows items.
std::size_t attend_items(const AttentionArgs& args);

// Runs items [begin, end) of one phase. `attend_f32_bf16_cache` is for AttentionMath::bfloat16,
// `attend_f32_s8_bf16_cache` for int8, and the other functions are for float32; `append` is for all formats.
using AttentionFunction = void(const AttentionArgs& args, std::size_t begin, std::size_t end, float* scratch);

}  // namespace chunkrt
