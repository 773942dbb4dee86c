// AVX-512 with VNNI: a tile of 12 x 1 vectors. Rounded attention has kernels of its own.
#define LOWBIT_VECTOR 64
#define LOWBIT_ROWS 12
#include "attend16_avx512.h"

namespace lowbit {

const FloatKernels* avx512_floats() {
  static const FloatKernels all = {FLOATS.rows, FLOATS.tile, attend, attend16, gelu, silu_times, norm};
  return &all;
}

}  // namespace lowbit
