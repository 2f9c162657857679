#include "kernels.h"

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>

#include "kernels/attention/queries.h"
#include "kernels/dispatch.h"
#include "kernels/gemm/arranged.h"
#include "kernels/gemm/parted.h"

namespace chunkrt::roofline {
namespace {

// Reproducible values in [-1, 1).
Aligned<float> floats(std::size_t count) {
  Aligned<float> values(count);
  std::uint32_t state = 1;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f;
  }
  return values;
}

// Operands of one thread; threads share no cache line that they write.
struct Operands {
  Aligned<float> input, weight, output, scales;
  Aligned<std::int8_t> values, arranged;
  Aligned<std::int32_t> sums;
};

using OperandsPerThread = std::shared_ptr<std::vector<Operands>>;

OperandsPerThread operands(std::size_t num_threads, const Operands& one) {
  return std::make_shared<std::vector<Operands>>(num_threads, one);
}

// Typical quantised rows of activations: values near 0, and a few at the ends of int8.
Aligned<std::int8_t> on_a_grid(std::size_t count) {
  std::mt19937 bits(1);
  std::normal_distribution<float> values(0.0f, 24.0f);
  Aligned<std::int8_t> out(count);
  for (std::int8_t& value : out) value = static_cast<std::int8_t>(std::clamp(values(bits), -127.0f, 127.0f));
  return out;
}

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void require(bool is_met, const char* what) {
  if (!is_met) throw std::invalid_argument(what);
}

}  // namespace

Ring::Ring(std::size_t size) : words((size + 7) / 8), num_bytes(size) {
  std::uint64_t state = 1;
  for (std::uint64_t& word : words) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    word = state | 0x0101010101010101u;
  }
  bytes = reinterpret_cast<char*>(words.data());
}

const Kernel<AttentionFunction>& attend_kernel(AttentionMath math) {
  if (math == AttentionMath::int8) return attend_f32_s8_bf16_cache;
  return math == AttentionMath::bfloat16 ? attend_f32_bf16_cache : attend_f32_f32_cache;
}

std::string selected_isa(const std::string& kernel) {
  if (kernel == "gemm") return std::string(name_of(select_kernel(gemm_f32_s8row_s8col).isa));
  if (kernel == "attention") return std::string(name_of(select_kernel(attend_f32_f32_cache).isa));
  if (kernel == "attention_bfloat16") return std::string(name_of(select_kernel(attend_f32_bf16_cache).isa));
  if (kernel == "attention_int8") return std::string(name_of(select_kernel(attend_f32_s8_bf16_cache).isa));
  if (kernel == "rms_norm") return std::string(name_of(select_kernel(rms_norm_f32_f32).isa));
  if (kernel == "quantize") return std::string(name_of(select_kernel(quantize_s8row_f32).isa));
  if (kernel == "silu_mul") return std::string(name_of(select_kernel(silu_mul_f32_f32_f32).isa));
  throw std::invalid_argument("no kernel of this list is called " + kernel);
}

Body gemm(const Ring& ring, std::size_t num_threads, std::size_t rows, std::size_t depth, std::size_t columns,
          bool is_streamed) {
  const std::size_t groups = round_up(depth, kGemmDepthPerGroup) / kGemmDepthPerGroup;
  const std::size_t blocks = round_up(columns, kGemmColumnsPerBlock) / kGemmColumnsPerBlock;
  const std::size_t weight_bytes = blocks * groups * kGemmBytesPerGroup;
  const std::size_t num_weights = is_streamed ? ring.num_bytes / weight_bytes : 1;
  require(weight_bytes <= ring.num_bytes, "gemm: a weight larger than the ring");
  const KernelRow<GemmFunction>& selected = select_kernel(gemm_f32_s8row_s8col);
  Operands one = {.input = {},
                  .weight = floats(columns),
                  .output = Aligned<float>(rows * columns),
                  .scales = floats(rows),
                  .values = on_a_grid(rows * groups * kGemmDepthPerGroup),
                  .arranged = {},
                  .sums = Aligned<std::int32_t>(rows)};
  for (std::size_t i = 0; i < one.values.size(); ++i) {
    one.sums[i / (groups * kGemmDepthPerGroup)] += one.values[i];
  }
  CHUNKRT_ON_X86(if (selected.isa == Isa::avx2) {
    one.arranged.resize(rows * parted_row_bytes(groups));
    part_rows_avx2(one.values.data(), groups, 0, rows, one.arranged.data());
  })
  CHUNKRT_ON_ARM(if (selected.isa == Isa::neon_i8mm) {
    one.arranged.resize(round_up(rows, 2) * paired_row_bytes(groups));
    pair_rows_neon_i8mm(one.values.data(), groups, 0, rows, one.arranged.data());
  })
  const OperandsPerThread own = operands(num_threads, one);
  GemmFunction* kernel = selected.function;
  // Each thread's place in the ring; they start far from each other.
  const auto next = std::make_shared<std::vector<std::size_t>>();
  for (std::size_t thread = 0; thread < num_threads; ++thread) {
    next->push_back(thread * num_weights / num_threads);
  }
  return [=, bytes = ring.bytes](std::size_t thread, std::size_t calls) {
    Operands& mine = (*own)[thread];
    std::size_t weight = (*next)[thread];
    for (; calls > 0; --calls) {
      kernel({.left = mine.values.data(),
              .left_scales = mine.scales.data(),
              .left_sums = mine.sums.data(),
              .right = reinterpret_cast<const std::int8_t*>(bytes + weight * weight_bytes),
              .right_scales = mine.weight.data(),
              .bias = nullptr,
              .residual = nullptr,
              .out = mine.output.data(),
              .rows = rows,
              .columns = columns,
              .groups = groups,
              .residual_stride = 0,
              .out_stride = columns,
              .arranged = mine.arranged.empty() ? nullptr : mine.arranged.data()},
             0, blocks);
      if (++weight == num_weights) weight = 0;
    }
    (*next)[thread] = weight;
  };
}

Body attention(std::size_t num_threads, std::size_t rows, std::size_t position, std::size_t num_heads,
               std::size_t num_kv_heads, std::size_t head_dim, AttentionMath math) {
  require(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && head_dim % 2 == 0,
          "attention: expected a multiple of the kv heads, and an even head_dim");
  const bool has_tiles = math != AttentionMath::float32;
  const CacheType type = has_tiles ? CacheType::bfloat16 : CacheType::float16;
  const std::size_t capacity = round_up(position + rows, 64);
  const std::size_t cache = num_kv_heads * capacity * cache_row_bytes(type, head_dim) / sizeof(std::uint16_t);
  // 0.5, or in the keys of int8 two integers or half a scale
  const std::uint16_t half = has_tiles ? 0x3f00 : 0x3800;
  struct Caches {
    Aligned<std::uint16_t> keys, values;
    Aligned<float> scratch;
  };
  const OperandsPerThread own =
      operands(num_threads, {.input = floats(rows * (num_heads + 2 * num_kv_heads) * head_dim),
                             .weight = floats(capacity * head_dim / 2),  // for both cosines and sines
                             .output = Aligned<float>(rows * num_heads * head_dim),
                             .scales = {},
                             .values = {},
                             .arranged = {},
                             .sums = {}});
  const auto caches = std::make_shared<std::vector<Caches>>(
      num_threads, Caches{Aligned<std::uint16_t>(cache, half), Aligned<std::uint16_t>(cache, half),
                          Aligned<float>(attention_scratch_floats(head_dim, math))});
  AttentionFunction* append = select_kernel(append_cache_f32).function;
  const auto& row = select_kernel(attend_kernel(math));
  AttentionFunction* attend = row.function;
  const std::size_t per_item =
      has_tiles && row.isa != Isa::amx_bf16 ? queries_per_tiled_item(rows * (num_heads / num_kv_heads)) : 0;
  return [=](std::size_t thread, std::size_t calls) {
    Operands& mine = (*own)[thread];
    Caches& state = (*caches)[thread];
    const AttentionArgs args = {.qkv = mine.input.data(),
                                .cos = mine.weight.data(),
                                .sin = mine.weight.data(),
                                .key_cache = state.keys.data(),
                                .value_cache = state.values.data(),
                                .cache_type = type,
                                .has_raw_keys = false,
                                .out = mine.output.data(),
                                .rows = rows,
                                .position = position,
                                .table_row = 0,
                                .capacity = capacity,
                                .window = 0,
                                .num_heads = num_heads,
                                .num_kv_heads = num_kv_heads,
                                .head_dim = head_dim,
                                .rotary_dim = head_dim,
                                .scale = 0.125f,
                                .math = math,
                                .queries_per_item = per_item};
    for (; calls > 0; --calls) {
      append(args, 0, rows, state.scratch.data());
      attend(args, 0, attend_items(args), state.scratch.data());
    }
  };
}

Body rms_norm(std::size_t num_threads, std::size_t rows, std::size_t width) {
  const OperandsPerThread own = operands(num_threads, {.input = floats(rows * width),
                                                       .weight = floats(width),
                                                       .output = Aligned<float>(rows * width),
                                                       .scales = {},
                                                       .values = {},
                                                       .arranged = {},
                                                       .sums = {}});
  RmsNormFunction* kernel = select_kernel(rms_norm_f32_f32).function;
  return [=](std::size_t thread, std::size_t calls) {
    Operands& mine = (*own)[thread];
    const RmsNormArgs args = {.input = mine.input.data(),
                              .weight = mine.weight.data(),
                              .out = mine.output.data(),
                              .width = width,
                              .epsilon = 1e-5f};
    for (; calls > 0; --calls) kernel(args, 0, rows);
  };
}

Body quantize(std::size_t num_threads, std::size_t rows, std::size_t width) {
  const std::size_t padded_width = round_up(width, kGemmDepthPerGroup);
  const OperandsPerThread own = operands(num_threads, {.input = floats(rows * width),
                                                       .weight = {},
                                                       .output = {},
                                                       .scales = Aligned<float>(rows),
                                                       .values = Aligned<std::int8_t>(rows * padded_width),
                                                       .arranged = {},
                                                       .sums = Aligned<std::int32_t>(rows)});
  QuantizeFunction* kernel = select_kernel(quantize_s8row_f32).function;
  return [=](std::size_t thread, std::size_t calls) {
    Operands& mine = (*own)[thread];
    const QuantizeArgs args = {.input = mine.input.data(),
                               .values = mine.values.data(),
                               .scales = mine.scales.data(),
                               .sums = mine.sums.data(),
                               .width = width,
                               .padded_width = padded_width};
    for (; calls > 0; --calls) kernel(args, 0, rows);
  };
}

Body silu_mul(std::size_t num_threads, std::size_t rows, std::size_t width) {
  const OperandsPerThread own = operands(num_threads, {.input = floats(rows * 2 * width),
                                                       .weight = {},
                                                       .output = Aligned<float>(rows * width),
                                                       .scales = {},
                                                       .values = {},
                                                       .arranged = {},
                                                       .sums = {}});
  BinaryFunction* kernel = select_kernel(silu_mul_f32_f32_f32).function;
  return [=](std::size_t thread, std::size_t calls) {
    Operands& mine = (*own)[thread];
    for (; calls > 0; --calls) {
      for (std::size_t row = 0; row < rows; ++row) {
        const float* gate = mine.input.data() + row * 2 * width;
        kernel(gate, gate + width, mine.output.data() + row * width, width);
      }
    }
  };
}

}  // namespace chunkrt::roofline
