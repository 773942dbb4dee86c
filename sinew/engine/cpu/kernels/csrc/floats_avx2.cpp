// AVX2 with fused multiply-adds. A tile of 6 rows x 2 vectors has 12 sums. Rounded attention has a separate kernel.
#define LOWBIT_VECTOR 32
#define LOWBIT_ROWS 6
#include "attend16.h"

namespace lowbit {

const FloatKernels* avx2_floats() {
  static const FloatKernels all = {FLOATS.rows, FLOATS.tile, attend, attend16, gelu, silu_times, norm};
  return &all;
}

}  // namespace lowbit
