// quantize with NEON.
#include "kernels/quantize/loops.h"
