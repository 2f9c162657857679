// linear_attention with AVX-512.
#include "kernels/linear_attention/loops.h"
