// Wine 8 lacks this system library, which programs in Rust use for random numbers. Real Windows has it.
#include <stddef.h>

__declspec(dllimport) unsigned char __stdcall SystemFunction036(void* buffer, unsigned long size);  // RtlGenRandom

__declspec(dllexport) int __stdcall ProcessPrng(unsigned char* buffer, size_t size) {
  while (size > 0) {
    const unsigned long part = size < 0x10000000 ? (unsigned long)size : 0x10000000;
    if (!SystemFunction036(buffer, part)) return 0;
    buffer += part;
    size -= part;
  }
  return 1;
}
