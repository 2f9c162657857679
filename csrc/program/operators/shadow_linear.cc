// shadow_linear: the product of the weight of a linear on an 8-bit grid and the part of the input that
// exceeds the grid's range.
#include <algorithm>
#include <span>
#include <utility>

#include "kernels/dispatch.h"
#include "program/operators/activations.h"
#include "program/operators/operators.h"

namespace chunkrt {
namespace {

// This size is large enough that the call overhead of a kernel is small.
constexpr std::size_t kChannelBlocksPerPiece = 4;
constexpr std::size_t kColumnBlocksPerPiece = 8;

struct ShadowKernels {
  DequantizeRowFunction* dequantize_row;
  AddOuterProductFunction* add_outer_product;
};

// Columns of the weight, and its hot rows in float32.
struct ShadowWeight {
  DequantizeRowArgs packed;  // `out` has room for one row
  std::span<const std::int32_t> hot_channels;
  const float* hot_rows;  // float32 [hot_channels.size(), columns]
};

// out [num_rows, columns] = outliers @ weight, for the columns of blocks [begin, end).
void multiply(const ShadowKernels& kernels, const FindOutliersArgs& found, ShadowWeight weight, float* out,
              std::size_t begin, std::size_t end) {
  const std::size_t columns = weight.packed.columns, first = begin * kGemmColumnsPerBlock;
  const std::size_t width = std::min(end * kGemmColumnsPerBlock, columns) - first;
  for (std::size_t row = 0; row < found.num_rows; ++row)
    std::fill_n(out + row * columns + first, width, 0.0f);
  auto hot = weight.hot_channels.begin();
  for (std::size_t block = 0; block * kShadowChannelsPerBlock < found.width; ++block) {
    if (found.lists.block_counts[block] == 0) continue;
    const std::size_t block_begin = block * kShadowChannelsPerBlock;
    const std::size_t block_end = std::min(block_begin + kShadowChannelsPerBlock, found.width);
    for (std::size_t channel = block_begin; channel < block_end; ++channel) {
      if (found.lists.counts[channel] == 0) continue;
      const auto wanted = static_cast<std::int32_t>(channel);
      hot = std::lower_bound(hot, weight.hot_channels.end(), wanted);
      const float* row = weight.packed.out;
      if (hot != weight.hot_channels.end() && *hot == wanted) {
        row = weight.hot_rows + static_cast<std::size_t>(hot - weight.hot_channels.begin()) * columns + first;
      } else {
        weight.packed.channel = channel;
        kernels.dequantize_row(weight.packed, begin, end);
      }
      kernels.add_outer_product({.rows = found.lists.rows + channel * found.num_rows,
                                 .left = found.lists.remainders + channel * found.num_rows,
                                 .right = row,
                                 .out = out + first,
                                 .count = static_cast<std::size_t>(found.lists.counts[channel]),
                                 .columns = width,
                                 .out_stride = columns});
    }
  }
}

}  // namespace

ValueId shadow_linear(ProgramBuilder& builder, ValueId input, ValueId packed, ValueId scales,
                      float input_step, ValueId hot_channels) {
  const Symbol symbol = builder.rows_of(input, "shadow_linear's input");
  const std::size_t depth = builder.width_of(input);
  for (const ValueId id : {scales, hot_channels}) {
    require(builder.value(id).shape.size() == 1,
            "shadow_linear: expected scales [N] and hot channels [H], got " +
                describe(builder.value(id).dtype, builder.value(id).shape));
  }
  const std::size_t columns = builder.value(scales).shape[0].size,
                    num_hot = builder.value(hot_channels).shape[0].size;
  const std::size_t groups = ceil_divide(depth, kGemmDepthPerGroup);
  const std::size_t column_blocks = ceil_divide(columns, kGemmColumnsPerBlock);
  builder.require_constant(scales, Dtype::float32, {fixed(columns)}, "shadow_linear's scales");
  builder.require_constant(hot_channels, Dtype::int32, {fixed(num_hot)}, "shadow_linear's hot channels");
  builder.require_constant(
      packed, Dtype::int8,
      {fixed(column_blocks), fixed(groups), fixed(kGemmColumnsPerBlock), fixed(kGemmDepthPerGroup)},
      "shadow_linear's packed weight");
  require_step(input_step, "shadow_linear's input step");
  const ShadowKernels kernels = {select_kernel(dequantize_row_f32_s8col).function,
                                 select_kernel(add_outer_product_f32_f32_f32).function};

  DequantizeRowArgs row = {.packed = static_cast<const std::int8_t*>(builder.value(packed).data),
                           .scales = static_cast<const float*>(builder.value(scales).data),
                           .out = nullptr,
                           .channel = 0,
                           .columns = columns,
                           .groups = groups};
  std::vector<float> dequantized(checked_multiply(num_hot, columns));
  for (std::size_t i = 0; i < num_hot; ++i) {
    const auto* channels = static_cast<const std::int32_t*>(builder.value(hot_channels).data);
    row.channel = static_cast<std::size_t>(channels[i]);
    require(channels[i] >= 0 && row.channel < depth && (i == 0 || channels[i - 1] < channels[i]),
            "shadow_linear: expected ascending hot channels from 0 to " + std::to_string(depth - 1) +
                ", got " + std::to_string(channels[i]) + " at place " + std::to_string(i));
    row.out = dequantized.data() + i * columns;
    kernels.dequantize_row(row, 0, column_blocks);
  }
  const ValueId hot_rows = builder.floats(std::move(dequantized));

  // Allocate enough for the case that every element is an outlier.
  const std::size_t channel_blocks = ceil_divide(depth, kShadowChannelsPerBlock);
  const ValueId block_counts = builder.temporary(Dtype::int32, {fixed(channel_blocks)});
  const ValueId counts = builder.temporary(Dtype::int32, {fixed(depth)});
  const ValueId rows = builder.temporary(Dtype::int32, {fixed(depth), rows_dimension(symbol)});
  const ValueId remainders = builder.temporary(Dtype::float32, {fixed(depth), rows_dimension(symbol)});
  const auto outliers = [=](const Frame& frame) {
    return FindOutliersArgs{.input = frame.get<const float>(input),
                            .step = input_step,
                            .lists = {.block_counts = frame.get<std::int32_t>(block_counts),
                                      .counts = frame.get<std::int32_t>(counts),
                                      .rows = frame.get<std::int32_t>(rows),
                                      .remainders = frame.get<float>(remainders)},
                            .num_rows = frame.size_of(symbol),
                            .width = depth};
  };
  std::vector<ValueId> uses = {input, block_counts, counts, rows, remainders};
  FindOutliersFunction* find = select_kernel(find_outliers_f32_f32).function;
  builder.add_loop([=](const Frame&) { return channel_blocks; }, kChannelBlocksPerPiece, "find_outliers",
                   uses,
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
                     find(outliers(frame), begin, end);
                   });

  const ValueId out = builder.float_rows(symbol, columns);
  uses.insert(uses.end(), {packed, scales, hot_channels, hot_rows, out});
  builder.need_scratch(columns);
  builder.add_loop([=](const Frame&) { return column_blocks; }, kColumnBlocksPerPiece, "shadow_linear", uses,
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                     ShadowWeight weight = {
                         .packed = row,
                         .hot_channels = {frame.get<const std::int32_t>(hot_channels), num_hot},
                         .hot_rows = frame.get<const float>(hot_rows)};
                     weight.packed.out = scratch;
                     multiply(kernels, outliers(frame), weight, frame.get<float>(out), begin, end);
                   });
  return out;
}

}  // namespace chunkrt
