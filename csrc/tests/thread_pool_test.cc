// Tests the thread pool: single execution of every item, consecutive loops, concurrent callers, and failures.
#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

constexpr std::size_t kBudgets[] = {1, 2, 3, 8};

// Runs two loops, the second of which reads plain memory that other threads wrote in the first. No two
// threads may have the same member number at the same time.
void check_two_loops(ThreadPool& pool, std::size_t count, std::size_t piece) {
  std::vector<std::size_t> visits(count), sums(count), members(pool.budget());
  {
    ThreadPool::Team team(pool);
    team.parallel_for(count, piece, [&](std::size_t begin, std::size_t end, std::size_t member) {
      check(begin < end && end <= count, "a piece is out of range");
      check(member < pool.budget(), "a member's number is out of range");
      members[member] += end - begin;
      for (std::size_t i = begin; i < end; ++i) ++visits[i];
    });
    team.parallel_for(count, piece, [&](std::size_t begin, std::size_t end, std::size_t) {
      for (std::size_t i = begin; i < end; ++i) {
        sums[i] = std::accumulate(visits.begin(), visits.end(), std::size_t{0});
      }
    });
  }
  check(visits == std::vector<std::size_t>(count, 1), "an item ran not once");
  check(sums == std::vector<std::size_t>(count, count), "the second loop began before the first had ended");
  check(std::accumulate(members.begin(), members.end(), std::size_t{0}) == count,
        "two threads had one member's number");
}

void test_loops() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    for (const std::size_t count : {0u, 1u, 2u, 7u, 64u}) {
      for (const std::size_t piece : {1u, 3u, 100u}) check_two_loops(pool, count, piece);
    }
  }
}

// A loop of one piece runs on the caller: another thread would have to be woken, and to fetch the data.
void test_one_piece() {
  const std::thread::id caller = std::this_thread::get_id();
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    ThreadPool::Team team(pool);
    for (const std::size_t count : {1u, 2u, 9u}) {
      std::size_t num_calls = 0;
      team.parallel_for(count, 9, [&](std::size_t begin, std::size_t end, std::size_t member) {
        check(std::this_thread::get_id() == caller, "another thread took the only piece");
        check(begin == 0 && end == count && member == 0, "the only piece is not the whole loop");
        ++num_calls;
      });
      check(num_calls == 1, "the only piece did not run exactly once");
    }
  }
}

// Runs a loop of few pieces and then a loop of many pieces; late helpers of the first loop find the second
// one.
void test_loops_in_a_row() {
  constexpr std::size_t kNumRounds = 20000, kCount = 24;
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    ThreadPool::Team team(pool);
    std::vector<std::size_t> visits(kCount);
    const auto visit = [&](std::size_t begin, std::size_t end, std::size_t) {
      for (std::size_t i = begin; i < end; ++i) ++visits[i];
    };
    for (std::size_t round = 1; round <= kNumRounds; ++round) {
      team.parallel_for(kCount, round % 2 == 0 ? 1 : 9, visit);
      check(visits == std::vector<std::size_t>(kCount, round), "an item did not run exactly once in a loop");
    }
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

// A single caller uses the complete budget: each piece waits until the maximum number of threads compute.
void test_budget_is_used() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    ThreadPool::Team team(pool);
    std::atomic<std::size_t> num_computing{0};
    team.parallel_for(budget, 1, [&](std::size_t, std::size_t, std::size_t) {
      ++num_computing;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (num_computing < budget) {
        check(std::chrono::steady_clock::now() < deadline, "a helper never came");
        std::this_thread::yield();
      }
    });
    check(num_computing == budget, "a piece ran not once");
  }
}

// If more callers exist than may compute, they never use more threads at once than the budget allows.
void test_budget_is_kept() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    std::atomic<std::size_t> num_computing{0}, most{0};
    const auto compute = [&](std::size_t, std::size_t, std::size_t) {
      const std::size_t now = ++num_computing;
      for (std::size_t seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
      }
      std::this_thread::yield();
      --num_computing;
    };
    std::vector<std::thread> callers;
    for (std::size_t i = 0; i < budget + 2; ++i) {
      callers.emplace_back([&] {
        for (std::size_t round = 0; round < 200; ++round) ThreadPool::Team(pool).parallel_for(16, 1, compute);
      });
    }
    for (std::thread& caller : callers) caller.join();
    check(most <= budget, [&] {
      return std::to_string(most) + " threads computed under a budget of " + std::to_string(budget);
    });
  }
}

void test_failure() {
  for (const std::size_t budget : kBudgets) {
    ThreadPool pool(budget);
    std::string message;
    try {
      ThreadPool::Team team(pool);
      team.parallel_for(10, 1, [](std::size_t begin, std::size_t end, std::size_t) {
        if (begin <= 5 && 5 < end) throw Failure("item 5");
      });
    } catch (const Failure& failure) {
      message = failure.what();
    }
    check(message == "item 5", "the exception of an item did not arrive");
    check_two_loops(pool, 20, 3);
  }
}

}  // namespace

void test_thread_pool(Suite& suite) {
  suite.run("thread pool: loops and visibility of writes", test_loops);
  suite.run("thread pool: one piece", test_one_piece);
  suite.run("thread pool: consecutive loops", test_loops_in_a_row);
  suite.run("thread pool: concurrent callers", test_callers_together);
  suite.run("thread pool: the budget is used", test_budget_is_used);
  suite.run("thread pool: the budget is kept", test_budget_is_kept);
  suite.run("thread pool: a failure", test_failure);
}

}  // namespace chunkrt::testing
