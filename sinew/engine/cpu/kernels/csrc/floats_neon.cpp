// NEON. A tile of 5 rows x 4 vectors has 20 sums in 32 registers.
#define LOWBIT_VECTOR 16
#define LOWBIT_ROWS 5
#include "floats.h"

namespace lowbit {

const FloatKernels* neon_floats() { return &FLOATS; }

}  // namespace lowbit
