#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(_M_ARM64) && !defined(__aarch64__)
#include <intrin.h>
#endif

namespace chunkrt {
namespace {

// The time for which a waiting thread polls before it sleeps. The loops of a program, and the programs of a
// chunk, follow each other within microseconds, which is faster than sleeping and waking.
constexpr std::chrono::microseconds kTimeBeforeSleep{50};
constexpr int kPausesPerLook = 8;

// The largest amount that a waiting thread fetches, a part of its second-level cache, and the bytes that it
// fetches between two looks.
constexpr std::size_t kMostBytesAhead = 256 * 1024;
constexpr std::size_t kBytesPerLook = 1024;
constexpr std::size_t kLineBytes = 64;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)  // Clang for Windows defines _M_ARM64 too
  __asm__ volatile("yield");
#elif defined(_M_ARM64)
  __yield();
#endif
}

// Starts the transfer of a cache line to the second-level cache.
void fetch(const std::byte* line) {
#if defined(_MSC_VER) && !defined(__clang__)
#if defined(_M_X64)
  _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
#endif
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

// Waits until the value is no longer `old`.
void wait_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kTimeBeforeSleep;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

// The current loop of a caller. The object outlives the loop, so that a helper may read it at any time.
// Members that are not atomic are read only between taking a piece and reporting it as done; the caller
// cannot continue in this time.
struct ThreadPool::Loop {
  // A stretch of adjacent pieces, initially for one thread. The upper half contains the loop's number, so
  // that no thread can take a piece of a finished loop; the lower half contains the number of taken pieces.
  struct alignas(64) Stretch {
    std::atomic<std::uint64_t> taken{0};
  };

  explicit Loop(std::size_t num_stretches) : stretches(num_stretches) {}

  void open(std::size_t new_count, std::size_t new_piece, const Body& new_body, Upcoming upcoming) {
    // The stretches are updated first: a thread that reads the new number of pieces but the old loop's number
    // must not find a piece.
    const std::uint32_t next = number.load(std::memory_order_relaxed) + 1;
    for (Stretch& stretch : stretches)
      stretch.taken.store(std::uint64_t{next} << 32, std::memory_order_relaxed);
    count = new_count;
    piece = new_piece;
    body = &new_body;
    upcoming_data.store(upcoming.data, std::memory_order_relaxed);
    upcoming_bytes.store(upcoming.bytes, std::memory_order_relaxed);
    num_done.store(0, std::memory_order_relaxed);
    num_pieces.store(static_cast<std::uint32_t>((count + piece - 1) / piece), std::memory_order_release);
    number.store(next, std::memory_order_release);
  }

  // Takes a piece for `member`: from the member's own stretch if a piece is left there, otherwise from
  // another member's stretch.
  bool take(std::size_t member, std::size_t& index) {
    const std::uint32_t present = number.load(std::memory_order_acquire);
    const std::size_t total = num_pieces.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      const std::size_t owner = (member + i) % stretches.size();
      const std::size_t first = total * owner / stretches.size(),
                        last = total * (owner + 1) / stretches.size();
      std::atomic<std::uint64_t>& taken = stretches[owner].taken;
      std::uint64_t seen = taken.load(std::memory_order_relaxed);
      while (seen >> 32 == present && first + (seen & 0xffffffffu) < last) {
        index = first + (seen & 0xffffffffu);
        if (taken.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_relaxed))
          return true;
      }
    }
    return false;
  }

  std::atomic<std::uint32_t> number{0};
  std::atomic<std::uint32_t> num_pieces{0};
  std::vector<Stretch> stretches;
  std::size_t count = 0;
  std::size_t piece = 1;
  const Body* body = nullptr;
  // Unlike the members above, these are also read after the loop.
  std::atomic<const std::byte*> upcoming_data{nullptr};
  std::atomic<std::size_t> upcoming_bytes{0};
  std::atomic<std::uint32_t> num_done{0};
  std::atomic<bool> has_failed{false};
  std::mutex failure_mutex;
  std::exception_ptr failure;
};

ThreadPool::ThreadPool(std::size_t budget) : budget_(budget), permits_(budget) {
  if (budget == 0) throw std::invalid_argument("a thread pool needs a budget of at least 1 thread, got 0");
  for (std::size_t i = 0; i < budget; ++i) {
    loops_.push_back(std::make_unique<Loop>(budget));
    idle_loops_.push_back(loops_.back().get());
  }
  for (std::size_t member = 1; member < budget; ++member) {
    helpers_.emplace_back([this, member] { serve(member); });
  }
}

ThreadPool::~ThreadPool() {
  is_stopping_.store(true, std::memory_order_relaxed);
  for (std::atomic<std::uint32_t>* awaited : {&num_opened_, &num_left_}) {
    awaited->fetch_add(1, std::memory_order_release);
    awaited->notify_all();
  }
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::serve(std::size_t member) {
  for (;;) {
    const std::uint32_t opened = num_opened_.load(std::memory_order_acquire);
    const std::uint32_t left = num_left_.load(std::memory_order_acquire);
    if (is_stopping_.load(std::memory_order_relaxed)) return;
    if (!take_permit()) {  // the callers and the other helpers use the complete budget
      num_left_.wait(left, std::memory_order_acquire);
      continue;
    }
    const Loop* helped = nullptr;
    for (const std::unique_ptr<Loop>& loop : loops_) {
      if (help(*loop, member)) helped = loop.get();
    }
    return_permit();
    if (helped) {
      fetch_ahead(*helped, member, num_opened_, opened);
    } else {
      wait_while(num_opened_, opened);
    }
  }
}

// Takes pieces until none is left, or a caller waits for the helper's permit.
bool ThreadPool::help(Loop& loop, std::size_t member) {
  bool has_helped = false;
  std::size_t index;
  while (waiting_callers_.load(std::memory_order_relaxed) == 0 && loop.take(member, index)) {
    run_piece(loop, index, member);
    has_helped = true;
  }
  return has_helped;
}

// Fetches the memory that the loop after `loop` reads first, while the value is `old`.
void ThreadPool::fetch_ahead(const Loop& loop, std::size_t member, const std::atomic<std::uint32_t>& value,
                             std::uint32_t old) const {
  const std::byte* const data = loop.upcoming_data.load(std::memory_order_relaxed);
  const std::size_t bytes = loop.upcoming_bytes.load(std::memory_order_relaxed);
  const std::size_t first = bytes / budget_ * member;
  const std::size_t last = first + std::min(bytes / budget_, kMostBytesAhead);
  for (std::size_t begin = first; begin < last; begin += kBytesPerLook) {
    if (value.load(std::memory_order_relaxed) != old) return;
    const std::size_t end = std::min(begin + kBytesPerLook, last);
    for (std::size_t byte = begin; byte < end; byte += kLineBytes) fetch(data + byte);
  }
}

void ThreadPool::run_piece(Loop& loop, std::size_t index, std::size_t member) {
  try {
    const std::size_t begin = index * loop.piece, end = std::min(begin + loop.piece, loop.count);
    if (!loop.has_failed.load(std::memory_order_relaxed)) (*loop.body)(begin, end, member);
  } catch (...) {
    const std::lock_guard lock(loop.failure_mutex);
    if (!loop.failure) loop.failure = std::current_exception();
    loop.has_failed.store(true, std::memory_order_relaxed);
  }
  const std::uint32_t num_pieces = loop.num_pieces.load(std::memory_order_relaxed);
  if (loop.num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_pieces) loop.num_done.notify_one();
}

bool ThreadPool::take_permit() {
  std::size_t permits = permits_.load();
  while (permits > 0) {
    if (permits_.compare_exchange_weak(permits, permits - 1)) return true;
  }
  return false;
}

void ThreadPool::return_permit() {
  permits_.fetch_add(1);
  if (waiting_callers_.load() > 0) {
    const std::lock_guard lock(mutex_);
    permit_returned_.notify_one();
  }
}

ThreadPool::Team::Team(ThreadPool& pool) : pool_(pool) {
  std::unique_lock lock(pool.mutex_);
  pool.waiting_callers_.fetch_add(1);
  pool.permit_returned_.wait(lock, [&pool] { return pool.take_permit(); });
  pool.waiting_callers_.fetch_sub(1);
  pool.num_callers_.fetch_add(1, std::memory_order_relaxed);
  loop_ = pool.idle_loops_.back();
  pool.idle_loops_.pop_back();
}

ThreadPool::Team::~Team() {
  {
    const std::lock_guard lock(pool_.mutex_);
    pool_.idle_loops_.push_back(loop_);
    pool_.num_callers_.fetch_sub(1, std::memory_order_relaxed);
  }
  pool_.return_permit();
  pool_.num_left_.fetch_add(1, std::memory_order_release);
  pool_.num_left_.notify_all();
}

void ThreadPool::Team::parallel_for(std::size_t count, std::size_t piece, const Body& body,
                                    Upcoming upcoming) {
  if (count == 0) return;
  const bool has_helpers = pool_.num_callers_.load(std::memory_order_relaxed) < pool_.budget();
  if (!has_helpers || count <= piece) return body(0, count, 0);
  loop_->open(count, piece, body, upcoming);
  pool_.num_opened_.fetch_add(1, std::memory_order_release);
  pool_.num_opened_.notify_all();
  for (std::size_t index; loop_->take(0, index);) pool_.run_piece(*loop_, index, 0);
  const std::uint32_t num_pieces = loop_->num_pieces.load(std::memory_order_relaxed);
  for (std::uint32_t done; (done = loop_->num_done.load(std::memory_order_acquire)) != num_pieces;) {
    if (done + 1 == num_pieces) pool_.fetch_ahead(*loop_, 0, loop_->num_done, done);
    wait_while(loop_->num_done, done);
  }
  if (loop_->has_failed.load(std::memory_order_relaxed)) {
    const std::exception_ptr failure = std::exchange(loop_->failure, nullptr);
    loop_->has_failed.store(false, std::memory_order_relaxed);
    std::rethrow_exception(failure);
  }
}

}  // namespace chunkrt
