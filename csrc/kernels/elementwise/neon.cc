// elementwise with NEON.
#include "kernels/elementwise/loops.h"
