// low_rank_sum: the products of the rows' LoRA adapters.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"
#include "program/adapter_tables.h"
#include "program/operators/operators.h"
#include "program/sizes.h"

namespace chunkrt {
namespace {

// Up to this number of rows, threads share the first product of a row by its parts, otherwise by rows.
constexpr std::size_t kFewRows = 4;
constexpr std::size_t kPartsPerItem = 2;
constexpr std::size_t kRowsPerItem = 24;  // a multiple of the rows of a kernel's tile

// Adjacent rows with one adapter, which changes the weight.
struct Run {
  std::size_t first_row, num_rows;
  std::shared_ptr<const LowRankFactors> factors;
};

// The adapters of a run's rows.
class Rows {
 public:
  Rows(const AdapterTables& tables, std::size_t weight, const std::int64_t* adapters, std::size_t num_rows)
      : num_rows_(num_rows) {
    for (std::size_t row = 0; row < num_rows;) {
      const std::int64_t number = adapters[row];
      const std::int64_t* const end =
          std::find_if(adapters + row, adapters + num_rows, [=](std::int64_t n) { return n != number; });
      const auto last = static_cast<std::size_t>(end - adapters);
      auto factors = number == 0 ? nullptr : tables.find(number, weight);
      if (factors) {
        stride_ = std::max(stride_, factors->rank_blocks * kLowRankBlock);
        runs_.push_back({row, last - row, std::move(factors)});
      }
      row = last;
    }
  }

  const std::vector<Run>& runs() const { return runs_; }
  // Distance of the rows of the first product.
  std::size_t stride() const { return stride_; }
  bool are_few() const { return num_rows_ <= kFewRows; }
  // Size of the first product of all rows.
  std::size_t size() const { return num_rows_ * stride_; }
  // Number of items of a block of ranks.
  std::size_t items_per_block(const Run& run) const {
    return are_few() ? kLowRankParts / kPartsPerItem : ceil_divide(run.num_rows, kRowsPerItem);
  }

 private:
  std::size_t num_rows_, stride_ = 0;
  std::vector<Run> runs_;
};

// Calls visit(run, item) for the items [begin, end); items are numbered within their run.
template <typename Visit>
void visit_items(const Rows& rows, std::size_t begin, std::size_t end, const Visit& visit) {
  std::size_t base = 0;
  for (const Run& run : rows.runs()) {
    const std::size_t count = run.factors->rank_blocks * rows.items_per_block(run);
    const std::size_t first = std::max(begin, base), last = std::min(end, base + count);
    for (std::size_t item = first; item < last; ++item) visit(run, item - base);
    base += count;
  }
}

// Adds the parts of the first product of few rows.
void add_parts(const Rows& rows, const float* parts, float* sums) {
  const std::size_t size = rows.size();
  for (const Run& run : rows.runs()) {
    for (std::size_t row = run.first_row; row < run.first_row + run.num_rows; ++row) {
      const std::size_t begin = row * rows.stride();
      for (std::size_t i = begin; i < begin + run.factors->rank_blocks * kLowRankBlock; ++i) {
        sums[i] = (parts[i] + parts[i + size]) + (parts[i + 2 * size] + parts[i + 3 * size]);
      }
    }
  }
}

}  // namespace

ValueId low_rank_sum(ProgramBuilder& builder, ValueId product, ValueId input, ValueId adapters,
                     std::shared_ptr<AdapterTables> tables, const std::string& weight) {
  const Symbol symbol = builder.rows_of(product, "low_rank_sum's product");
  require(builder.rows_of(input, "low_rank_sum's input") == symbol,
          "low_rank_sum: the input differs from the product in its rows");
  const Value& numbers = builder.value(adapters);
  const Shape of_rows = {rows_dimension(symbol)};
  require(numbers.kind == ValueKind::input && numbers.dtype == Dtype::int64 && numbers.shape == of_rows,
          "low_rank_sum: expected the numbers of adapters as an input " + describe(Dtype::int64, of_rows) +
              ", got " + describe(numbers.dtype, numbers.shape));
  const std::size_t depth = builder.width_of(input), columns = builder.width_of(product);
  if (builder.value(product).kind != ValueKind::temporary)
    product = chunkrt::columns(builder, product, 0, columns);

  const std::size_t index = tables->index_of(weight);
  const auto rows_in = [=](const Frame& frame) {
    return Rows(*tables, index, frame.get<const std::int64_t>(adapters), frame.size_of(symbol));
  };
  builder.add_check({adapters}, [=](const Frame& frame) {
    const Rows rows = rows_in(frame);
    for (const Run& run : rows.runs()) {
      const std::size_t found_depth = run.factors->depth, found_columns = run.factors->columns;
      if (found_depth == depth && found_columns == columns) continue;
      throw std::invalid_argument("an adapter changes '" + weight + "' as [" + std::to_string(found_columns) +
                                  ", " + std::to_string(found_depth) + "], and the program has [" +
                                  std::to_string(columns) + ", " + std::to_string(depth) + "]");
    }
  });

  // The first product; of few rows, each part is stored separately.
  const std::size_t most_rows = std::max(builder.max_rows(), kLowRankParts * kFewRows);
  const ValueId reduced = builder.temporary(Dtype::float32, {fixed(most_rows), fixed(kMaxAdapterRanks)});
  LowRankDownFunction* reduce = select_kernel(low_rank_down_f32_f32).function;
  builder.add_loop(
      [=](const Frame& frame) {
        const Rows rows = rows_in(frame);
        std::size_t count = 0;
        for (const Run& run : rows.runs()) count += run.factors->rank_blocks * rows.items_per_block(run);
        return count;
      },
      1, "low_rank_down", {input, adapters, reduced},
      [=](const Frame& frame, std::size_t begin, std::size_t end, float*) {
        const Rows rows = rows_in(frame);
        visit_items(rows, begin, end, [&](const Run& run, std::size_t item) {
          const std::size_t per_block = rows.items_per_block(run);
          const std::size_t block = item / per_block, place = item % per_block;
          const std::size_t offset = rows.are_few() ? 0 : place * kRowsPerItem;
          const std::size_t first_part = rows.are_few() ? place * kPartsPerItem : 0;
          const std::size_t row = run.first_row + offset;
          reduce({.left = frame.get<const float>(input) + row * depth,
                  .a = run.factors->a + block * depth * kLowRankBlock,
                  .out = frame.get<float>(reduced) + row * rows.stride() + block * kLowRankBlock,
                  .out_stride = rows.stride(),
                  .part_stride = rows.are_few() ? rows.size() : 0,
                  .rows = rows.are_few() ? run.num_rows : std::min(run.num_rows - offset, kRowsPerItem),
                  .depth = depth},
                 first_part, rows.are_few() ? first_part + kPartsPerItem : kLowRankParts);
        });
      });

  builder.need_scratch(kFewRows * kMaxAdapterRanks);
  LowRankUpFunction* expand = select_kernel(low_rank_up_f32_f32).function;
  const std::size_t blocks = ceil_divide(columns, kLowRankBlock);
  builder.add_loop([=](const Frame& frame) { return rows_in(frame).runs().empty() ? 0 : blocks; }, 1,
                   "low_rank_up", {reduced, adapters, product},
                   [=](const Frame& frame, std::size_t begin, std::size_t end, float* scratch) {
                     const Rows rows = rows_in(frame);
                     const float* left = frame.get<const float>(reduced);
                     if (rows.are_few()) {
                       add_parts(rows, left, scratch);
                       left = scratch;
                     }
                     for (const Run& run : rows.runs()) {
                       expand({.left = left + run.first_row * rows.stride(),
                               .left_stride = rows.stride(),
                               .b = run.factors->b,
                               .spans = run.factors->spans.data(),
                               .out = frame.get<float>(product) + run.first_row * columns,
                               .rows = run.num_rows,
                               .columns = columns},
                              begin, end);
                     }
                   });
  return product;
}

}  // namespace chunkrt
