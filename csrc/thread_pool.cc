#include "thread_pool.h"

#include <algorithm>
#include <stdexcept>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace chunkrt {
namespace {

// The steps of a program are microseconds apart, less than it takes to sleep and wake: look this often first.
constexpr int kLooksBeforeSleep = 256;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(_M_ARM64)
  __yield();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits until the value is no longer `old`.
template <typename T>
T wait_while(const std::atomic<T>& value, T old) {
  for (int look = 0; look < kLooksBeforeSleep; ++look) {
    const T seen = value.load(std::memory_order_acquire);
    if (seen != old) return seen;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

void Team::parallel_for(std::size_t count, std::size_t piece,
                        const std::function<void(std::size_t, std::size_t)>& body) {
  try {
    if (size_ == 1) {
      if (!has_failed_.load(std::memory_order_relaxed) && count > 0) body(0, count);
      return;
    }
    while (!has_failed_.load(std::memory_order_relaxed)) {
      const std::size_t begin = next_item_.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= count) break;
      body(begin, std::min(begin + piece, count));
    }
  } catch (...) {
    record_failure();
  }
  if (size_ > 1) wait_for_all();
}

void Team::wait_for_all() {
  const std::uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) {
    wait_while(generation_, generation);
    return;
  }
  arrived_.store(0, std::memory_order_relaxed);
  next_item_.store(0, std::memory_order_relaxed);
  generation_.store(generation + 1, std::memory_order_release);
  generation_.notify_all();
}

void Team::record_failure() {
  const std::lock_guard lock(failure_mutex_);
  if (!failure_) failure_ = std::current_exception();
  has_failed_.store(true, std::memory_order_relaxed);
}

ThreadPool::ThreadPool(std::size_t budget) : budget_(budget), permits_(budget) {
  if (budget == 0) throw std::invalid_argument("a thread pool needs a budget of at least 1 thread, got 0");
  for (std::size_t i = 0; i < budget; ++i) {
    teams_.push_back(std::make_unique<Team>());
    idle_teams_.push_back(teams_.back().get());
  }
  for (std::size_t i = 1; i < budget; ++i) {
    helpers_.push_back(std::make_unique<Helper>());
    Helper& helper = *helpers_.back();
    helper.thread = std::thread([this, &helper] { serve(helper); });
    idle_helpers_.push_back(&helper);
  }
}

ThreadPool::~ThreadPool() {
  for (const auto& helper : helpers_) {
    helper->team.store(&stop_, std::memory_order_release);
    helper->team.notify_one();
  }
  for (const auto& helper : helpers_) helper->thread.join();
}

void ThreadPool::run(const std::function<void(Team&, std::size_t)>& work) {
  std::vector<Helper*> helpers;
  Team* team = gather_team(helpers);
  team->work_ = &work;
  team->helpers_at_work_.store(helpers.size(), std::memory_order_relaxed);
  for (std::size_t i = 0; i < helpers.size(); ++i) {
    helpers[i]->member = i + 1;
    helpers[i]->team.store(team, std::memory_order_release);
    helpers[i]->team.notify_one();
  }
  try {
    work(*team, 0);
  } catch (...) {
    team->record_failure();
  }
  for (std::size_t left; (left = team->helpers_at_work_.load(std::memory_order_acquire)) != 0;) {
    wait_while(team->helpers_at_work_, left);
  }
  const std::exception_ptr failure = team->failure_;
  dissolve(team, helpers);
  if (failure) std::rethrow_exception(failure);
}

Team* ThreadPool::gather_team(std::vector<Helper*>& helpers) {
  helpers.reserve(budget_ - 1);
  std::unique_lock lock(mutex_);
  ++waiting_callers_;
  permit_returned_.wait(lock, [this] { return permits_ > 0; });
  --waiting_callers_;
  // One permit stays for each caller that waits too.
  const std::size_t size = permits_ > waiting_callers_ ? permits_ - waiting_callers_ : 1;
  permits_ -= size;
  Team* team = idle_teams_.back();
  idle_teams_.pop_back();
  helpers.assign(idle_helpers_.end() - static_cast<std::ptrdiff_t>(size - 1), idle_helpers_.end());
  idle_helpers_.resize(idle_helpers_.size() - (size - 1));
  team->size_ = size;
  return team;
}

void ThreadPool::dissolve(Team* team, const std::vector<Helper*>& helpers) {
  team->failure_ = nullptr;
  team->has_failed_.store(false, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    permits_ += team->size_;
    idle_helpers_.insert(idle_helpers_.end(), helpers.begin(), helpers.end());
    idle_teams_.push_back(team);
  }
  permit_returned_.notify_all();
}

void ThreadPool::serve(Helper& helper) {
  for (Team* team; (team = wait_while<Team*>(helper.team, nullptr)) != &stop_;) {
    helper.team.store(nullptr, std::memory_order_relaxed);
    try {
      (*team->work_)(*team, helper.member);
    } catch (...) {
      team->record_failure();
    }
    team->helpers_at_work_.fetch_sub(1, std::memory_order_acq_rel);
    team->helpers_at_work_.notify_one();
  }
}

}  // namespace chunkrt
