// The attention operator: its operands, the checks of every run, and its two phases.
#include <algorithm>
#include <stdexcept>

#include "kernels/attention/queries.h"
#include "kernels/dispatch.h"
#include "program/operators/operators.h"

namespace chunkrt {
namespace {

CacheType cache_type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16:
      return CacheType::float16;
    case Dtype::int8:
      return CacheType::int8;
    case Dtype::uint16:
      return CacheType::bfloat16;
    default:
      return CacheType::float32;
  }
}

const KernelRow<AttentionFunction>& attend_kernel(AttentionMath math) {
  switch (math) {
    case AttentionMath::bfloat16:
      return select_kernel(attend_f32_bf16_cache);
    case AttentionMath::int8:
      return select_kernel(attend_f32_s8_bf16_cache);
    default:
      return select_kernel(attend_f32_f32_cache);
  }
}

// "input 'position': 3 rows from 62 on do not fit: "
std::string misfit(const std::string& name, std::size_t rows, std::int64_t first) {
  return "input '" + name + "': " + std::to_string(rows) + " rows from " + std::to_string(first) +
         " on do not fit: ";
}

bool fits(std::int64_t first, std::size_t rows, std::size_t limit) {
  return first >= 0 && rows <= limit && static_cast<std::size_t>(first) <= limit - rows;
}

// A ring buffer may wrap only at the start of a key block, and must not overwrite positions that a row of the
// chunk attends to.
void check_ring(const std::string& name, std::int64_t first, std::size_t rows, std::size_t slots,
                std::size_t window) {
  if (first < 0) throw std::out_of_range(misfit(name, rows, first) + "positions count from 0");
  if (fits(first, rows, slots)) return;
  if (slots % kKeysPerBlock != 0) {
    throw std::out_of_range(misfit(name, rows, first) + "a ring of " + std::to_string(slots) +
                            " slots cannot wrap, because their number is not a multiple of " +
                            std::to_string(kKeysPerBlock));
  }
  if (rows > slots || window > slots - rows + 1) {
    throw std::out_of_range(misfit(name, rows, first) + "rows that see " + std::to_string(window) +
                            " positions need a ring of window + rows - 1 slots, found " +
                            std::to_string(slots));
  }
}

}  // namespace

ValueId attention(ProgramBuilder& builder, ValueId qkv, ValueId position, ValueId table_row, ValueId cos,
                  ValueId sin, ValueId key_cache, ValueId value_cache, const AttentionShape& shape,
                  std::optional<ValueId> qkv_bias, std::optional<ValueId> sinks) {
  const std::size_t num_heads = shape.num_heads, num_kv_heads = shape.num_kv_heads, head_dim = shape.head_dim;
  const std::size_t most_heads = head_dim > 0 ? builder.width_of(qkv) / head_dim : 0;
  require(num_heads <= most_heads && num_kv_heads <= most_heads,
          "attention: more heads than the columns of qkv hold: " + std::to_string(num_heads) + " and " +
              std::to_string(num_kv_heads) + " of " + std::to_string(head_dim) + " columns");
  require(num_kv_heads > 0 && head_dim > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
          "attention: expected the number of heads to be a multiple of that of kv heads, got " +
              std::to_string(num_heads) + " and " + std::to_string(num_kv_heads));
  const std::size_t qkv_width = (num_heads + (shape.appends ? 2 * num_kv_heads : 0)) * head_dim;
  require(builder.rows_of(qkv, "attention's qkv") == Symbol::T && builder.width_of(qkv) == qkv_width,
          "attention: expected qkv " +
              describe(Dtype::float32, {rows_dimension(Symbol::T), fixed(qkv_width)}) + ", got " +
              describe(Dtype::float32, builder.value(qkv).shape));
  for (const auto& [id, what] : {std::pair{position, "position"}, std::pair{table_row, "table_row"}}) {
    const Value& start = builder.value(id);
    require(start.kind == ValueKind::input && start.dtype == Dtype::int64 && start.shape == Shape{fixed(1)},
            "attention: expected " + std::string(what) + " to be an input int64 [1], got " +
                describe(start.dtype, start.shape));
  }
  const Shape& found_shape = builder.value(key_cache).shape;
  const bool has_tiles = shape.math != AttentionMath::float32;
  const bool is_ring = shape.window > 0 && found_shape.size() == 3 && found_shape[1].symbol == Symbol::W;
  const Symbol slots = is_ring ? Symbol::W : Symbol::P;
  const Shape cache_shape = {fixed(num_kv_heads), rows_dimension(slots), fixed(head_dim)};
  for (const ValueId id : {key_cache, value_cache}) {
    const Value& cache = builder.value(id);
    require(cache.kind == ValueKind::state && cache.shape == cache_shape,
            "attention: expected the caches to be states " + describe(cache.dtype, cache_shape) + ", got " +
                describe(cache.dtype, cache.shape));
    builder.use_as_cache(id, has_tiles && !shape.has_raw_keys);
  }
  const Shape table_shape = builder.value(cos).shape;
  require(table_shape.size() == 2 && 2 * table_shape[1].size <= head_dim,
          "attention: expected cos [context, rotary_dim / 2] with rotary_dim <= " + std::to_string(head_dim) +
              ", got " + describe(builder.value(cos).dtype, table_shape));
  builder.require_constant(cos, Dtype::float32, table_shape, "attention's cos");
  builder.require_constant(sin, Dtype::float32, table_shape, "attention's sin");
  const std::size_t context = table_shape[0].size;
  if (qkv_bias) {
    builder.require_constant(*qkv_bias, Dtype::float32, {fixed(qkv_width)}, "attention's qkv_bias");
    require(shape.has_raw_keys && shape.appends,
            "attention: only raw keys of the layer that appends them can omit a bias");
  }

  require(shape.math != AttentionMath::int8 || !shape.has_raw_keys,
          "attention: scores in int8 need keys that are cached after RoPE");
  require(shape.soft_cap >= 0.0f,
          "attention: expected a soft cap above 0, or 0 for none, got " + std::to_string(shape.soft_cap));
  const DualChunks chunks = shape.dual_chunks;
  require(chunks.period == 0 || (chunks.limit >= chunks.period && shape.window == 0),
          "attention: expected dual chunks without a window, and a limit of at least their period " +
              std::to_string(chunks.period) + ", got " + std::to_string(chunks.limit));
  if (sinks) builder.require_constant(*sinks, Dtype::float32, {fixed(num_heads)}, "attention's sinks");

  builder.add_check(
      {position, table_row, key_cache, value_cache},
      [=, name = builder.value(position).name,
       table_name = builder.value(table_row).name](const Frame& frame) {
        if (frame.dtypes[key_cache] != frame.dtypes[value_cache]) {
          throw std::invalid_argument("attention: the key and value caches must be of one type, got " +
                                      std::string(name_of(frame.dtypes[key_cache])) + " and " +
                                      std::string(name_of(frame.dtypes[value_cache])));
        }
        if (shape.math == AttentionMath::int8 && frame.dtypes[key_cache] != Dtype::uint16) {
          throw std::invalid_argument("attention: scores in int8 need caches in tiles, uint16, got " +
                                      std::string(name_of(frame.dtypes[key_cache])));
        }
        if (frame.dtypes[key_cache] == Dtype::uint16 && frame.size_of(slots) % kKeysPerBlock != 0) {
          throw std::invalid_argument("attention: caches in tiles need a multiple of " +
                                      std::to_string(kKeysPerBlock) + " slots, got " +
                                      std::to_string(frame.size_of(slots)));
        }
        const std::int64_t first = *frame.get<const std::int64_t>(position);
        const std::int64_t first_table_row = *frame.get<const std::int64_t>(table_row);
        const std::size_t rows = frame.size_of(Symbol::T), num_slots = frame.size_of(slots);
        if (is_ring) {
          check_ring(name, first, rows, num_slots, shape.window);
        } else if (!fits(first, rows, num_slots)) {
          throw std::out_of_range(misfit(name, rows, first) + "the cache holds " + std::to_string(num_slots) +
                                  " positions");
        }
        if (chunks.period > 0) {
          const std::size_t last = static_cast<std::size_t>(first) + rows - 1;
          if (std::min({last, chunks.limit, 2 * chunks.period - 1}) >= context || first_table_row < first) {
            throw std::out_of_range(misfit(table_name, rows, first_table_row) + "the rotary tables have " +
                                    std::to_string(context) + " rows, and the position is " +
                                    std::to_string(first));
          }
          return;
        }
        if (!fits(first_table_row, rows, context)) {
          throw std::out_of_range(misfit(table_name, rows, first_table_row) + "the rotary tables have " +
                                  std::to_string(context) + " rows");
        }
        if (!shape.has_raw_keys) return;
        const auto window = static_cast<std::int64_t>(std::min<std::size_t>(shape.window, INT64_MAX));
        const std::int64_t num_earlier = window > 0 ? std::min(first, window - 1) : first;
        if (first_table_row < num_earlier) {
          throw std::out_of_range("input '" + table_name + "': row " + std::to_string(first_table_row) +
                                  " of the rotary tables leaves no rows for the " +
                                  std::to_string(num_earlier) + " earlier keys that position " +
                                  std::to_string(first) + " sees");
        }
      });

  const auto& attending = attend_kernel(shape.math);
  const ValueId out = builder.float_rows(Symbol::T, num_heads * head_dim);
  const auto arguments = [=, isa = attending.isa](const Frame& frame) {
    const bool is_small = frame.dtypes[key_cache] == Dtype::uint16 && isa != Isa::amx_bf16;
    const bool has_bias = qkv_bias && frame.dtypes[key_cache] == Dtype::int8;
    return AttentionArgs{
        .qkv = frame.get<const float>(qkv),
        .cos = frame.get<const float>(cos),
        .sin = frame.get<const float>(sin),
        .key_cache = frame.get<void>(key_cache),
        .value_cache = frame.get<void>(value_cache),
        .cache_type = cache_type_of(frame.dtypes[key_cache]),
        .has_raw_keys = shape.has_raw_keys,
        .key_bias = has_bias ? frame.get<const float>(*qkv_bias) + num_heads * head_dim : nullptr,
        .out = frame.get<float>(out),
        .rows = frame.size_of(Symbol::T),
        .position = static_cast<std::size_t>(*frame.get<const std::int64_t>(position)),
        .table_row = static_cast<std::size_t>(*frame.get<const std::int64_t>(table_row)),
        .capacity = frame.size_of(slots),
        .window = shape.window,
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .rotary_dim = 2 * table_shape[1].size,
        .scale = shape.scale,
        .soft_cap = shape.soft_cap,
        .sinks = sinks ? frame.get<const float>(*sinks) : nullptr,
        .math = shape.math,
        .queries_per_item =
            is_small ? queries_per_tiled_item(frame.size_of(Symbol::T) * (num_heads / num_kv_heads)) : 0,
        .appends = shape.appends,
        .dual_chunks = chunks};
  };
  builder.need_scratch(attention_scratch_floats(head_dim, shape.math));
  AttentionFunction* attend = attending.function;
  std::vector<ValueId> uses = {qkv, position, table_row, cos, sin, key_cache, value_cache, out};
  for (const std::optional<ValueId>& constant : {qkv_bias, sinks}) {
    if (constant) uses.push_back(*constant);
  }
  if (shape.appends) {
    AttentionFunction* append = select_kernel(append_cache_f32).function;
    const auto append_rows = [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
      append(arguments(frame), begin, end, scratch);
    };
    if (has_tiles) {
      // Item 0 is at a multiple of kPositionsTogether, so that pieces begin where positions are packed
      // together.
      const auto skipped = [=](const Frame& frame) {
        return static_cast<std::size_t>(*frame.get<const std::int64_t>(position)) % kPositionsTogether;
      };
      builder.add_loop([=](const Frame& frame) { return skipped(frame) + frame.size_of(Symbol::T); },
                       kPositionsTogether, "append_cache", uses,
                       [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                         const std::size_t first = skipped(frame);
                         append_rows(frame, std::max(begin, first) - first, std::max(end, first) - first,
                                     scratch);
                       });
    } else {
      builder.add_row_step(Symbol::T, "append_cache", uses, append_rows);
    }
  }
  builder.add_loop([=](const Frame& frame) { return attend_items(arguments(frame)); }, 1, "attention", uses,
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                     attend(arguments(frame), begin, end, scratch);
                   });
  return out;
}

}  // namespace chunkrt
