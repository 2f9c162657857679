// outliers with AVX2.
#include "kernels/outliers/loops.h"
