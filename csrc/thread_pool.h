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

class ThreadPool;

// The threads that run one piece of work together, as one of them sees it. All make the same calls in the
// same order.
class Team {
 public:
  using Body = std::function<void(std::size_t begin, std::size_t end)>;

  std::size_t size() const { return shared_.size; }

  // Runs body(begin, end) over pieces of at most `piece` (1 or more) items that together make [0, count);
  // returns when all are done. Each member has a stretch of neighbouring pieces and, when done with it, helps
  // with the others'. After an exception the rest is skipped, and ThreadPool::run throws it.
  void parallel_for(std::size_t count, std::size_t piece, const Body& body);

 private:
  friend class ThreadPool;

  struct alignas(64) Stretch {
    std::atomic<std::size_t> num_taken{0};
  };

  struct Shared {
    explicit Shared(std::size_t max_size) : stretches(max_size) {}

    void record_failure();

    std::size_t size = 1;
    const std::function<void(Team&, std::size_t)>* work = nullptr;
    std::vector<Stretch> stretches;  // one a member
    std::atomic<std::size_t> num_arrived{0};
    std::atomic<std::uint32_t> generation{0};
    std::atomic<std::uint32_t> helpers_at_work{0};
    std::atomic<bool> has_failed{false};
    std::mutex failure_mutex;
    std::exception_ptr failure;
  };

  Team(Shared& shared, std::size_t member) : shared_(shared), member_(member) {}

  void run_pieces(std::size_t count, std::size_t piece, const Body& body);
  void wait_for_all();

  Shared& shared_;
  std::size_t member_;
};

class ThreadPool {
 public:
  using Work = std::function<void(Team& team, std::size_t member)>;

  // `budget`: threads that may compute at once, at least 1; the pool starts budget - 1 helpers.
  explicit ThreadPool(std::size_t budget);
  // Nobody may be inside run().
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t budget() const { return budget_; }

  // Runs work(team, member) on every member of a team, the calling thread being member 0, and returns when
  // all are done. Throws the first exception that a member threw; one that is thrown between two parallel_for
  // would leave the others waiting. Not to be called from inside `work`.
  void run(const Work& work);

 private:
  struct Helper {
    std::atomic<Team::Shared*> team{nullptr};
    std::size_t member = 0;
    std::thread thread;
  };

  void serve(Helper& helper);
  Team::Shared& gather_team(std::vector<Helper*>& helpers);
  void dissolve(Team::Shared& team, const std::vector<Helper*>& helpers);

  std::size_t budget_;
  std::mutex mutex_;
  std::condition_variable permit_returned_;
  std::size_t permits_;
  std::size_t waiting_callers_ = 0;
  std::vector<Helper*> idle_helpers_;
  std::vector<Team::Shared*> idle_teams_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::vector<std::unique_ptr<Team::Shared>> teams_;
  Team::Shared stop_{0};  // its address tells a helper to end
};

}  // namespace chunkrt
