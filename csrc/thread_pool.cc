#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace chunkrt {
namespace {

// The stages of a program, and the programs of a chunk, follow each other in microseconds, less than it takes
// to fall asleep and be woken; so who waits looks for this long before it sleeps.
constexpr std::chrono::microseconds kTimeBeforeSleep{50};
constexpr int kPausesPerLook = 8;

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
  T seen = value.load(std::memory_order_acquire);
  const auto deadline = std::chrono::steady_clock::now() + kTimeBeforeSleep;
  while (seen == old && std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < kPausesPerLook; ++i) pause();
    std::this_thread::yield();
    seen = value.load(std::memory_order_acquire);
  }
  if (seen != old) return seen;
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

void Team::parallel_for(std::size_t count, std::size_t piece, const Body& body) {
  try {
    if (size() > 1) {
      run_pieces(count, piece, body);
    } else if (count > 0 && !shared_.has_failed.load(std::memory_order_relaxed)) {
      body(0, count);
    }
  } catch (...) {
    shared_.record_failure();
  }
  if (size() > 1) wait_for_all();
}

void Team::run_pieces(std::size_t count, std::size_t piece, const Body& body) {
  const std::size_t num_pieces = (count + piece - 1) / piece;
  for (std::size_t i = 0; i < size(); ++i) {
    const std::size_t owner = (member_ + i) % size();
    const std::size_t first = num_pieces * owner / size(), last = num_pieces * (owner + 1) / size();
    std::atomic<std::size_t>& num_taken = shared_.stretches[owner].num_taken;
    while (!shared_.has_failed.load(std::memory_order_relaxed)) {
      const std::size_t index = first + num_taken.fetch_add(1, std::memory_order_relaxed);
      if (index >= last) break;
      body(index * piece, std::min((index + 1) * piece, count));
    }
  }
}

void Team::wait_for_all() {
  const std::uint32_t generation = shared_.generation.load(std::memory_order_relaxed);
  if (shared_.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size()) {
    wait_while(shared_.generation, generation);
    return;
  }
  shared_.num_arrived.store(0, std::memory_order_relaxed);
  for (Stretch& stretch : shared_.stretches) stretch.num_taken.store(0, std::memory_order_relaxed);
  shared_.generation.store(generation + 1, std::memory_order_release);
  shared_.generation.notify_all();
}

void Team::Shared::record_failure() {
  const std::lock_guard lock(failure_mutex);
  if (!failure) failure = std::current_exception();
  has_failed.store(true, std::memory_order_relaxed);
}

ThreadPool::ThreadPool(std::size_t budget) : budget_(budget), permits_(budget) {
  if (budget == 0) throw std::invalid_argument("a thread pool needs a budget of at least 1 thread, got 0");
  for (std::size_t i = 0; i < budget; ++i) {
    teams_.push_back(std::make_unique<Team::Shared>(budget));
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

void ThreadPool::run(const Work& work) {
  std::vector<Helper*> helpers;
  Team::Shared& shared = gather_team(helpers);
  shared.work = &work;
  shared.helpers_at_work.store(static_cast<std::uint32_t>(helpers.size()), std::memory_order_relaxed);
  for (std::size_t i = 0; i < helpers.size(); ++i) {
    helpers[i]->member = i + 1;
    helpers[i]->team.store(&shared, std::memory_order_release);
    helpers[i]->team.notify_one();
  }
  try {
    Team team(shared, 0);
    work(team, 0);
  } catch (...) {
    shared.record_failure();
  }
  for (std::uint32_t left; (left = shared.helpers_at_work.load(std::memory_order_acquire)) != 0;) {
    wait_while(shared.helpers_at_work, left);
  }
  const std::exception_ptr failure = shared.failure;
  dissolve(shared, helpers);
  if (failure) std::rethrow_exception(failure);
}

Team::Shared& ThreadPool::gather_team(std::vector<Helper*>& helpers) {
  helpers.reserve(budget_ - 1);
  std::unique_lock lock(mutex_);
  ++waiting_callers_;
  permit_returned_.wait(lock, [this] { return permits_ > 0; });
  --waiting_callers_;
  // One permit stays for each caller that waits too.
  const std::size_t size = permits_ > waiting_callers_ ? permits_ - waiting_callers_ : 1;
  permits_ -= size;
  Team::Shared& team = *idle_teams_.back();
  idle_teams_.pop_back();
  helpers.assign(idle_helpers_.end() - static_cast<std::ptrdiff_t>(size - 1), idle_helpers_.end());
  idle_helpers_.resize(idle_helpers_.size() - (size - 1));
  team.size = size;
  return team;
}

void ThreadPool::dissolve(Team::Shared& team, const std::vector<Helper*>& helpers) {
  team.failure = nullptr;
  team.has_failed.store(false, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    permits_ += team.size;
    idle_helpers_.insert(idle_helpers_.end(), helpers.begin(), helpers.end());
    idle_teams_.push_back(&team);
  }
  permit_returned_.notify_all();
}

void ThreadPool::serve(Helper& helper) {
  for (Team::Shared* shared; (shared = wait_while<Team::Shared*>(helper.team, nullptr)) != &stop_;) {
    helper.team.store(nullptr, std::memory_order_relaxed);
    try {
      Team team(*shared, helper.member);
      (*shared->work)(team, helper.member);
    } catch (...) {
      shared->record_failure();
    }
    shared->helpers_at_work.fetch_sub(1, std::memory_order_acq_rel);
    shared->helpers_at_work.notify_one();
  }
}

}  // namespace chunkrt
