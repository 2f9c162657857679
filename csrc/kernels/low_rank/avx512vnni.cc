// low_rank with AVX-512.
#include "kernels/low_rank/loops.h"
