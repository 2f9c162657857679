// norm with NEON.
#include "kernels/norm/loops.h"
