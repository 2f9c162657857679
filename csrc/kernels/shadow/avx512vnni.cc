// shadow with AVX-512.
#include "kernels/shadow/loops.h"
