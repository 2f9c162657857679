// norm with AVX2.
#include "kernels/norm/loops.h"
