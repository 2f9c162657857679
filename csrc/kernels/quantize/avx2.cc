// quantize with AVX2.
#include "kernels/quantize/loops.h"
