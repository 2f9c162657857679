/* A stand-in for Qualcomm's libcdsprpc.so: ordinary memory, whose addresses can be looked up. */

#include <stdlib.h>

enum { MOST = 4096 };
static struct {
  char *start;
  size_t size;
} blocks[MOST];
static int num_blocks;

void *rpcmem_alloc(int heap, unsigned flags, int size) {
  void *memory = NULL;
  (void)heap, (void)flags;
  if (num_blocks == MOST || posix_memalign(&memory, 4096, (size_t)size) != 0) return NULL;
  blocks[num_blocks].start = memory;
  blocks[num_blocks++].size = (size_t)size;
  return memory;
}

void rpcmem_free(void *memory) {
  for (int i = 0; i < num_blocks; i++)
    if (blocks[i].start == memory) blocks[i] = blocks[--num_blocks];
  free(memory);
}

int rpcmem_to_fd(void *memory) { return memory ? 1000 : -1; }

void remote_register_buf(void *memory, int size, int fd) { (void)memory, (void)size, (void)fd; }
void remote_register_buf_attr(void *memory, int size, int fd, int attributes) {
  (void)memory, (void)size, (void)fd, (void)attributes;
}
void remote_register_buf_attr2(void *memory, size_t size, int fd, int attributes) {
  (void)memory, (void)size, (void)fd, (void)attributes;
}

int fake_is_shared(const char *memory) {
  for (int i = 0; i < num_blocks; i++)
    if (memory >= blocks[i].start && memory < blocks[i].start + blocks[i].size) return 1;
  return 0;
}
