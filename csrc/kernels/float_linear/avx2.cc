// float_linear with AVX2.
#include "kernels/float_linear/loops.h"
