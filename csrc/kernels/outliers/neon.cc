// outliers with NEON.
#include "kernels/outliers/loops.h"
