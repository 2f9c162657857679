// low_rank with NEON.
#include "kernels/low_rank/loops.h"
