#include "tests/guarded_buffer.h"

#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace chunkrt::testing {

namespace {

#if defined(_WIN32)

std::size_t page_bytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}
void* reserve(std::size_t num_bytes) { return VirtualAlloc(nullptr, num_bytes, MEM_RESERVE, PAGE_NOACCESS); }
bool make_accessible(void* pages, std::size_t num_bytes) {
  return VirtualAlloc(pages, num_bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr;
}
void release(void* pages, std::size_t) { VirtualFree(pages, 0, MEM_RELEASE); }

#else

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }
void* reserve(std::size_t num_bytes) {
  void* const pages = mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}
bool make_accessible(void* pages, std::size_t num_bytes) {
  return mprotect(pages, num_bytes, PROT_READ | PROT_WRITE) == 0;
}
void release(void* pages, std::size_t num_bytes) { munmap(pages, num_bytes); }

#endif

}  // namespace

GuardedPages::GuardedPages(std::size_t num_bytes) {
  const std::size_t page = page_bytes();
  const std::size_t usable = (num_bytes + page - 1) / page * page;
  mapping_bytes_ = usable + 2 * page;
  mapping_ = reserve(mapping_bytes_);
  if (mapping_ == nullptr) throw std::bad_alloc();
  char* const first = static_cast<char*>(mapping_) + page;
  if (usable > 0 && !make_accessible(first, usable)) throw std::bad_alloc();
  data_ = first + (usable - num_bytes);
}

GuardedPages::~GuardedPages() { release(mapping_, mapping_bytes_); }

}  // namespace chunkrt::testing
