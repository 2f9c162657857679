// elementwise with AVX-512.
#include "kernels/elementwise/loops.h"
