// float_linear with AVX-512.
#include "kernels/float_linear/loops.h"
