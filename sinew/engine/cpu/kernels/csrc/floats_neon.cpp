// NEON: a tile of 5 x 4 vectors makes 20 sums of 32 registers.
#define LOWBIT_VECTOR 16
#define LOWBIT_ROWS 5
#include "floats.h"

namespace lowbit {

const FloatKernels* neon_floats() { return &FLOATS; }

}  // namespace lowbit
