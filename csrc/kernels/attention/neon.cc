// attention with NEON.
#include "kernels/attention/loops.h"
