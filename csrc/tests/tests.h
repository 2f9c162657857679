// Contents of the test programs.
#pragma once

#include "tests/suite.h"

namespace chunkrt::testing {

// chunkrt_kernel_tests
void test_isa(Suite& suite);
void test_gemm(Suite& suite);
void test_block_gemm(Suite& suite);
void test_float_linear(Suite& suite);
void test_low_rank(Suite& suite);
void test_outliers(Suite& suite);
void test_quantize(Suite& suite);
void test_grid(Suite& suite);
void test_shadow(Suite& suite);
void test_norm(Suite& suite);
void test_elementwise(Suite& suite);
void test_attention(Suite& suite);
void test_attention_in_bfloat(Suite& suite);
void test_attention_in_int8(Suite& suite);
void test_linear_attention(Suite& suite);
void test_unpack(Suite& suite);

// chunkrt_program_tests
void test_thread_pool(Suite& suite);
void test_program(Suite& suite);
void test_segments(Suite& suite);
void test_block_linear(Suite& suite);
void test_linear_attention_program(Suite& suite);
void test_low_rank_sum(Suite& suite);
void test_routed_experts(Suite& suite);

}  // namespace chunkrt::testing
