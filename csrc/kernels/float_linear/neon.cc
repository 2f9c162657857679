// float_linear with NEON.
#include "kernels/float_linear/loops.h"
