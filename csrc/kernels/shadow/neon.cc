// shadow with NEON.
#include "kernels/shadow/loops.h"
