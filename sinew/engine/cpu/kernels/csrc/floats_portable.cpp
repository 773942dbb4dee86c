// Vectors of 16 bytes on any CPU. A tile has 4 rows x 16 columns.
#define LOWBIT_VECTOR 16
#define LOWBIT_ROWS 4
#include "floats.h"

namespace lowbit {

const FloatKernels* portable_floats() { return &FLOATS; }

}  // namespace lowbit
