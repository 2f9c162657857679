// The factors of loaded LoRA adapters. Programs find them by the numbers of a run's rows, so an adapter can
// be added and removed without a change of a program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/low_rank/low_rank.h"

namespace chunkrt {

inline constexpr std::size_t kMaxAdapterRanks = 2048;  // ranks of one linear, with those of combined tensors

// The factors that an adapter adds to a weight: see kernels/low_rank/low_rank.h.
struct LowRankFactors {
  std::size_t depth;
  std::size_t columns;
  std::size_t rank_blocks;
  const float* a;  // float32 [rank_blocks, depth, 16]
  const float* b;  // float32 [stored rows, 16]
  std::vector<LowRankSpan> spans;
  std::shared_ptr<const void> owner;  // keeps a and b alive
};

// All functions may be called by several threads at once.
class AdapterTables {
 public:
  // Factors by the name of a weight.
  using Adapter = std::map<std::string, LowRankFactors>;

  // Throws std::invalid_argument if the number is in use or below 1, or a weight has too many ranks.
  void add(std::int64_t number, const Adapter& adapter);
  // Without an adapter of that number, nothing happens.
  void remove(std::int64_t number);
  // The index of a weight, under which `find` knows it.
  std::size_t index_of(const std::string& weight);
  // Returns an adapter's factors of a weight, or nullptr if the adapter does not change the weight. Throws
  // std::out_of_range if there is no adapter of that number.
  std::shared_ptr<const LowRankFactors> find(std::int64_t number, std::size_t weight) const;

 private:
  using Indexed = std::map<std::size_t, LowRankFactors>;

  mutable std::mutex mutex_;
  std::map<std::string, std::size_t> indices_;
  std::map<std::int64_t, std::shared_ptr<const Indexed>> adapters_;
};

}  // namespace chunkrt
