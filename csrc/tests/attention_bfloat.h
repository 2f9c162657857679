// Tests of attention in bfloat16 on all its kernels. The AMX kernel is also tested on processors without AMX.
#pragma once

#include "tests/attention_prompt.h"
#include "tests/suite.h"

namespace chunkrt::testing {

// Runs a test on each bfloat16 attention kernel.
void run_in_bfloat(Suite& suite, const std::string& name, void (*test)(const Kernels&));

}  // namespace chunkrt::testing
