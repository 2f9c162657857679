// chunkrt_program_tests [FILTER]: checks the thread pool and programs; with a filter, the tests whose names
// contain it, and with -FILTER those whose names do not.
#include <cstdio>

#include "tests/tests.h"

int main(int argc, char** argv) {
  if (argc > 2) {
    std::fprintf(stderr, "usage: %s [FILTER]\n", argv[0]);
    return 2;
  }
  chunkrt::testing::Suite suite(argc == 2 ? argv[1] : "");
  chunkrt::testing::test_thread_pool(suite);
  chunkrt::testing::test_program(suite);
  chunkrt::testing::test_segments(suite);
  chunkrt::testing::test_block_linear(suite);
  chunkrt::testing::test_linear_attention_program(suite);
  chunkrt::testing::test_low_rank_sum(suite);
  chunkrt::testing::test_routed_experts(suite);
  return suite.finish();
}
