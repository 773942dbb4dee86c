// AVX-512 with VNNI. A tile has 12 rows x 1 vector. Rounded attention has a separate kernel.
#define LOWBIT_VECTOR 64
#define LOWBIT_ROWS 12
#include "attend16_avx512.h"

namespace lowbit {

const FloatKernels* avx512_floats() {
  static const FloatKernels all = {FLOATS.rows, FLOATS.tile, attend, attend16, gelu, silu_times, norm};
  return &all;
}

}  // namespace lowbit
