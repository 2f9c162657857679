#include "program/adapter_tables.h"

#include <stdexcept>
#include <utility>

namespace chunkrt {

void AdapterTables::add(std::int64_t number, const Adapter& adapter) {
  Indexed indexed;
  for (const auto& [weight, factors] : adapter) {
    if (factors.rank_blocks * kLowRankBlock > kMaxAdapterRanks) {
      throw std::invalid_argument("an adapter changes '" + weight + "' with " +
                                  std::to_string(factors.rank_blocks * kLowRankBlock) + " ranks; at most " +
                                  std::to_string(kMaxAdapterRanks) + " are supported");
    }
    indexed.emplace(index_of(weight), factors);
  }
  const std::lock_guard lock(mutex_);
  const bool is_new = number >= 1 && !adapters_.contains(number);
  if (!is_new) {
    throw std::invalid_argument("an adapter needs an unused number of 1 or more, got " +
                                std::to_string(number));
  }
  adapters_[number] = std::make_shared<const Indexed>(std::move(indexed));
}

void AdapterTables::remove(std::int64_t number) {
  std::shared_ptr<const Indexed> removed;  // is released without the lock
  const std::lock_guard lock(mutex_);
  if (const auto found = adapters_.find(number); found != adapters_.end()) {
    removed = std::move(found->second);
    adapters_.erase(found);
  }
}

std::size_t AdapterTables::index_of(const std::string& weight) {
  const std::lock_guard lock(mutex_);
  return indices_.try_emplace(weight, indices_.size()).first->second;
}

std::shared_ptr<const LowRankFactors> AdapterTables::find(std::int64_t number, std::size_t weight) const {
  std::shared_ptr<const Indexed> adapter;
  {
    const std::lock_guard lock(mutex_);
    const auto found = adapters_.find(number);
    if (found == adapters_.end()) {
      throw std::out_of_range("adapter " + std::to_string(number) + " is not loaded");
    }
    adapter = found->second;
  }
  const auto found = adapter->find(weight);
  return found == adapter->end() ? nullptr : std::shared_ptr<const LowRankFactors>(adapter, &found->second);
}

}  // namespace chunkrt
