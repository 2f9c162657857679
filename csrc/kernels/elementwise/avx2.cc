// elementwise with AVX2.
#include "kernels/elementwise/loops.h"
