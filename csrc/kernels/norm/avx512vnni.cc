// norm with AVX-512.
#include "kernels/norm/loops.h"
