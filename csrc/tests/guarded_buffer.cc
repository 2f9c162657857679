#include "tests/guarded_buffer.h"

#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define CHUNKRT_HAS_MMAP 1
#else
#include <cstdlib>
#define CHUNKRT_HAS_MMAP 0
#endif

namespace chunkrt::testing {

#if CHUNKRT_HAS_MMAP

GuardedPages::GuardedPages(std::size_t num_bytes) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t usable = (num_bytes + page - 1) / page * page;
  mapping_bytes_ = usable + 2 * page;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  char* const first = static_cast<char*>(mapping_) + page;
  if (usable > 0 && mprotect(first, usable, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  data_ = first + (usable - num_bytes);
}

GuardedPages::~GuardedPages() { munmap(mapping_, mapping_bytes_); }

#else

GuardedPages::GuardedPages(std::size_t num_bytes)
    : mapping_(std::calloc(num_bytes + 1, 1)), mapping_bytes_(num_bytes), data_(mapping_) {
  if (mapping_ == nullptr) throw std::bad_alloc();
}

GuardedPages::~GuardedPages() { std::free(mapping_); }

#endif

}  // namespace chunkrt::testing
