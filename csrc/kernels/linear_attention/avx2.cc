// linear_attention with AVX2.
#include "kernels/linear_attention/loops.h"
