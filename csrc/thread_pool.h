// One thread budget for everything that computes: the callers' own threads and the helpers that join them.
//
// A caller takes one permit, or waits for one, and then whatever else is free: it leads a team of that many
// threads until its work is done. So callers that come together run alone, one thread each, and a lone caller
// has all threads. Nothing that is computed may depend on a team's size.
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

namespace chunkrt {

// The threads that run one piece of work together. Every member makes the same calls in the same order.
class Team {
 public:
  std::size_t size() const { return size_; }

  // Runs body(begin, end) over pieces of at most `piece` items that together make [0, count), on whichever
  // member is free; returns when all are done. After an exception the rest is skipped, and ThreadPool::run
  // throws it.
  void parallel_for(std::size_t count, std::size_t piece,
                    const std::function<void(std::size_t begin, std::size_t end)>& body);

 private:
  friend class ThreadPool;

  void wait_for_all();
  void record_failure();

  std::size_t size_ = 1;
  const std::function<void(Team&, std::size_t)>* work_ = nullptr;
  std::atomic<std::size_t> next_item_{0};
  std::atomic<std::size_t> arrived_{0};
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<std::size_t> helpers_at_work_{0};
  std::atomic<bool> has_failed_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

class ThreadPool {
 public:
  // `budget`: threads that may compute at once, at least 1; the pool starts budget - 1 helpers.
  explicit ThreadPool(std::size_t budget);
  // Nobody may be inside run().
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t budget() const { return budget_; }

  // Runs work(team, member) on every member of a team, the calling thread being member 0, and returns when
  // all are done. Throws the first exception that a member threw. Not to be called from inside `work`.
  void run(const std::function<void(Team& team, std::size_t member)>& work);

 private:
  struct Helper {
    std::atomic<Team*> team{nullptr};
    std::size_t member = 0;
    std::thread thread;
  };

  void serve(Helper& helper);
  Team* gather_team(std::vector<Helper*>& helpers);
  void dissolve(Team* team, const std::vector<Helper*>& helpers);

  std::size_t budget_;
  std::mutex mutex_;
  std::condition_variable permit_returned_;
  std::size_t permits_;
  std::size_t waiting_callers_ = 0;
  std::vector<Helper*> idle_helpers_;
  std::vector<Team*> idle_teams_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::vector<std::unique_ptr<Team>> teams_;
  Team stop_;  // the address that tells a helper to end
};

}  // namespace chunkrt
