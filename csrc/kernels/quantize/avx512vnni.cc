// quantize with AVX-512.
#include "kernels/quantize/loops.h"
