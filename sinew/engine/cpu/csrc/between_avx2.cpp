// AVX2 with fused multiply-adds: a tile of 6 x 2 vectors makes 12 sums.
#define LOWBIT_VECTOR 32
#define LOWBIT_ROWS 6
#include "floats.h"

namespace lowbit {

const Between* avx2_between() { return &BETWEEN; }

}  // namespace lowbit
