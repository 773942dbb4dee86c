// AVX-VNNI: vpdpbusd on 256 bits, for Intel processors without AVX-512 (Alder Lake, N100, Core Ultra). The code is that
// of x86_avx512vnni.cpp, but a panel has two vectors.
#include <immintrin.h>

#include "jpeg.h"
#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 6;

// The product is written in assembler for the reason that x86_avx512vnni.cpp gives.
inline void dot(__m256i& sum, __m256i codes, __m256i x) {
#ifdef __AVXVNNI__
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x));
#else  // emulated
  sum = _mm256_dpbusd_avx_epi32(sum, codes, x);
#endif
}

template <int R>
struct Multiply {
  static void run(const Tile& t) {
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const __m256i* w = static_cast<const __m256i*>(t.w);
    std::memset(t.out, 0, R * CHANNELS * sizeof(float));
    for (int g = 0; g < t.groups; ++g) {
      __m256i sums[R][2];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_set1_epi32(-t.offsets[g * R + r]);
      for (int u = 0; u < t.units; ++u, x += R, w += 2) {
        const __m256i low = _mm256_loadu_si256(w), high = _mm256_loadu_si256(w + 1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256i a = _mm256_set1_epi32(x[r]);
          dot(sums[r][0], low, a);
          dot(sums[r][1], high, a);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) {
          float* out = t.out + r * CHANNELS + 8 * h;
          const __m256 scales = _mm256_loadu_ps(t.scales + g * CHANNELS + 8 * h);
          const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][h]), scales);
          _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), scaled));
        }
    }
  }
};

const auto MULTIPLY = Table<Multiply, ROWS>::run;
const Kernels AVXVNNI = {
    "avxvnni", {ROWS, ROWS, ROWS, ROWS}, 0, 4, 4, 128, {MULTIPLY, MULTIPLY, MULTIPLY, MULTIPLY}, quantize, expand<4, 4, 128>, pack<4, 4>,
    finish, resize, resample, jpeg, nullptr,
};

}  // namespace

const Kernels* avxvnni_kernels() { return &AVXVNNI; }

}  // namespace lowbit
