// low_rank with AVX2.
#include "kernels/low_rank/loops.h"
