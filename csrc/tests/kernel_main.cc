// chunkrt_kernel_tests [FILTER]: checks every compiled kernel; with a filter, the tests whose names contain
// it, and with -FILTER those whose names do not.
#include <cstdio>

#include "tests/tests.h"

int main(int argc, char** argv) {
  if (argc > 2) {
    std::fprintf(stderr, "usage: %s [FILTER]\n", argv[0]);
    return 2;
  }
  chunkrt::testing::Suite suite(argc == 2 ? argv[1] : "");
  chunkrt::testing::test_isa(suite);
  chunkrt::testing::test_gemm(suite);
  chunkrt::testing::test_block_gemm(suite);
  chunkrt::testing::test_float_linear(suite);
  chunkrt::testing::test_low_rank(suite);
  chunkrt::testing::test_outliers(suite);
  chunkrt::testing::test_quantize(suite);
  chunkrt::testing::test_grid(suite);
  chunkrt::testing::test_shadow(suite);
  chunkrt::testing::test_norm(suite);
  chunkrt::testing::test_elementwise(suite);
  chunkrt::testing::test_attention(suite);
  chunkrt::testing::test_attention_in_bfloat(suite);
  chunkrt::testing::test_attention_in_int8(suite);
  chunkrt::testing::test_linear_attention(suite);
  chunkrt::testing::test_unpack(suite);
  return suite.finish();
}
