// attention in bfloat16 by every kernel for it, and by AMX's where there is none.
#pragma once

#include "tests/attention_prompt.h"
#include "tests/suite.h"

namespace chunkrt::testing {

// Runs a test for each.
void run_in_bfloat(Suite& suite, const std::string& name, void (*test)(const Kernels&));

}  // namespace chunkrt::testing
