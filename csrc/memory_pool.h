// Memory that programs borrow while they run. The most recently returned block is lent first, because it may
// still be in the processor's caches. The pool keeps as many blocks as were ever lent at the same time; each
// block is as large as its largest request.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace chunkrt {

class MemoryPool {
 public:
  static constexpr std::size_t kAlignment = 64;  // a cache line, and the widest vector

  // A block that returns to its pool on destruction. The pool must outlive the block.
  class Block {
   public:
    Block(Block&& other) noexcept = default;
    Block& operator=(Block&& other) = delete;
    ~Block() {
      if (bytes_) pool_.take_back(std::move(bytes_), size_);
    }
    std::byte* get() const { return bytes_.get(); }

   private:
    friend class MemoryPool;
    struct Delete {
      void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{kAlignment}); }
    };
    using Bytes = std::unique_ptr<std::byte[], Delete>;
    Block(MemoryPool& pool, Bytes bytes, std::size_t size)
        : pool_(pool), bytes_(std::move(bytes)), size_(size) {}

    MemoryPool& pool_;
    Bytes bytes_;
    std::size_t size_;
  };

  // Lends at least this many bytes, aligned to kAlignment, with unspecified content.
  Block borrow(std::size_t size) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto [bytes, available] = std::move(idle_.back());
        idle_.pop_back();
        if (available >= size) return Block(*this, std::move(bytes), available);
      }
    }
    auto* bytes = static_cast<std::byte*>(::operator new[](size, std::align_val_t{kAlignment}));
    return Block(*this, Block::Bytes(bytes), size);
  }

 private:
  void take_back(Block::Bytes bytes, std::size_t size) {
    const std::lock_guard lock(mutex_);
    idle_.emplace_back(std::move(bytes), size);
  }

  std::mutex mutex_;
  std::vector<std::pair<Block::Bytes, std::size_t>> idle_;
};

}  // namespace chunkrt
