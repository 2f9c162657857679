// shadow with AVX2.
#include "kernels/shadow/loops.h"
