// AVX-512: a tile of 12 x 1 vectors.
#define LOWBIT_VECTOR 64
#define LOWBIT_ROWS 12
#include "floats.h"

namespace lowbit {

const FloatKernels* avx512_floats() { return &FLOATS; }

}  // namespace lowbit
