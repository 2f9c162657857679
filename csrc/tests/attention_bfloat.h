// Tests of attention in bfloat16 on every kernel for it, and on AMX's even without AMX.
#pragma once

#include "tests/attention_prompt.h"
#include "tests/suite.h"

namespace chunkrt::testing {

// Runs a test for each.
void run_in_bfloat(Suite& suite, const std::string& name, void (*test)(const Kernels&));

}  // namespace chunkrt::testing
