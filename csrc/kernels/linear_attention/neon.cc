// linear_attention with NEON.
#include "kernels/linear_attention/loops.h"
