// One thread budget for all computation: the threads of callers, and the helpers that join them.
//
// A caller executes its own loops; helpers take pieces of any loops, as long as the number of computing
// threads stays within the budget. So concurrent callers run on one thread each, and a single caller uses all
// threads. A caller waits for a helper only while that helper computes a piece, not if the helper is late or
// preempted. Results must not depend on the thread that computes them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memory_pool.h"

namespace chunkrt {

class ThreadPool {
 public:
  // Computes the items [begin, end). `member` identifies a thread within a loop: 0 is the caller, and helpers
  // have the numbers 1 to budget - 1.
  using Body = std::function<void(std::size_t begin, std::size_t end, std::size_t member)>;

  // Memory that the next loop reads, each member an equal share in order. A member without work fetches the
  // beginning of its share into its cache. The memory is not accessed, so it may be freed at any time.
  struct Upcoming {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  class Team;

  // `budget` is the number of threads that may compute at once, at least 1; the pool starts budget - 1
  // helpers.
  explicit ThreadPool(std::size_t budget);
  // All teams must have ended.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t budget() const { return budget_; }
  // An object that all users of the pool share in addition to the threads.
  MemoryPool& memory() { return memory_; }

 private:
  struct Loop;

  void serve(std::size_t member);
  bool help(Loop& loop, std::size_t member);
  void fetch_ahead(const Loop& loop, std::size_t member, const std::atomic<std::uint32_t>& value,
                   std::uint32_t old) const;
  void run_piece(Loop& loop, std::size_t index, std::size_t member);
  bool take_permit();
  void return_permit();

  MemoryPool memory_;
  const std::size_t budget_;
  std::atomic<std::size_t> permits_;
  std::atomic<std::size_t> waiting_callers_{0};
  std::atomic<std::size_t> num_callers_{0};
  std::mutex mutex_;
  std::condition_variable permit_returned_;
  std::vector<Loop*> idle_loops_;
  std::vector<std::unique_ptr<Loop>> loops_;  // one for each caller that may compute
  // number of loops so far, over all callers; idle helpers wait for a change
  std::atomic<std::uint32_t> num_opened_{0};
  // number of callers that have left; helpers without a permit wait for a change
  std::atomic<std::uint32_t> num_left_{0};
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> helpers_;
};

// A caller that may compute, from construction (which waits for its turn) to destruction. Each thread needs a
// separate Team.
class ThreadPool::Team {
 public:
  explicit Team(ThreadPool& pool);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs `body` over pieces of at most `piece` (1 or more) items that together cover [0, count), and returns
  // when all pieces are done. As far as possible, one thread computes adjacent pieces, and the caller
  // computes a single piece. After an exception the remaining pieces are skipped, and the first exception is
  // thrown.
  void parallel_for(std::size_t count, std::size_t piece, const Body& body, Upcoming upcoming = {});

 private:
  ThreadPool& pool_;
  Loop* loop_;
};

}  // namespace chunkrt
