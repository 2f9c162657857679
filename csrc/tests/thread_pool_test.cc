// The thread pool: every item once, barriers between loops, callers that come together, failures.
#include "thread_pool.h"

#include <numeric>
#include <thread>
#include <vector>

#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kBudgets[] = {1, 2, 3, 8};

// Two loops, the second reading what other members wrote in the first, in plain memory.
void check_two_loops(ThreadPool& pool, std::size_t count, std::size_t piece) {
  std::vector<std::size_t> visits(count), sums(count);
  pool.run([&](Team& team, std::size_t) {
    team.parallel_for(count, piece, [&](std::size_t begin, std::size_t end) {
      check(begin < end && end <= count, "a piece out of range");
      for (std::size_t i = begin; i < end; ++i) ++visits[i];
    });
    team.parallel_for(count, piece, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        sums[i] = std::accumulate(visits.begin(), visits.end(), std::size_t{0});
      }
    });
  });
  check(visits == std::vector<std::size_t>(count, 1), "an item ran not once");
  check(sums == std::vector<std::size_t>(count, count), "the second loop began before the first had ended");
}

void test_loops() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    for (const std::size_t count : {0u, 1u, 2u, 7u, 64u}) {
      for (const std::size_t piece : {1u, 3u, 100u}) check_two_loops(pool, count, piece);
    }
  }
}

void test_team() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    std::vector<std::size_t> visits(budget);
    pool.run([&](Team& team, std::size_t member) {
      check(team.size() == budget, "a lone caller does not get all threads");
      ++visits[member];
    });
    check(visits == std::vector<std::size_t>(budget, 1), "a member ran not once");
  }
}

void test_callers_together() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    std::vector<std::string> failures(4);
    std::vector<std::thread> callers;
    for (std::string& failure : failures) {
      callers.emplace_back([&pool, &failure] {
        try {
          for (std::size_t i = 0; i < 50; ++i) check_two_loops(pool, i, 2);
        } catch (const std::exception& error) {
          failure = error.what();
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    for (const std::string& failure : failures) check(failure.empty(), failure);
  }
}

void test_failure() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    bool is_later_loop_skipped = true;
    std::string message;
    try {
      pool.run([&](Team& team, std::size_t) {
        team.parallel_for(10, 1, [](std::size_t begin, std::size_t end) {
          if (begin <= 5 && 5 < end) throw Failure("item 5");
        });
        team.parallel_for(1, 1, [&](std::size_t, std::size_t) { is_later_loop_skipped = false; });
      });
    } catch (const Failure& failure) {
      message = failure.what();
    }
    check(message == "item 5", "the exception of an item did not arrive");
    check(is_later_loop_skipped, "a loop after a failure ran");
    check_two_loops(pool, 20, 3);
  }
}

}  // namespace

void test_thread_pool(Suite& suite) {
  suite.run("thread pool: loops and their barriers", test_loops);
  suite.run("thread pool: a lone caller's team", test_team);
  suite.run("thread pool: callers together", test_callers_together);
  suite.run("thread pool: a failure", test_failure);
}

}  // namespace chunkrt::testing
