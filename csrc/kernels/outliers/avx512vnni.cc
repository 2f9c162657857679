// outliers with AVX-512.
#include "kernels/outliers/loops.h"
