// AVX512_BF16. To a 32-bit lane, the instruction vdpbf16ps adds first the second of two products, then the first
// product, each rounded to nearest even. Numbers below 2^-126 are zeros. A vector has 16 channels x 2 values of k.
#include <immintrin.h>

#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 12;  // as in x86_avx512vnni.cpp

// The product is written in assembler for the reason that x86_avx512vnni.cpp gives.
inline void dot(__m512& sum, __m512i weights, __m512i x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x)); }

template <int R, int PANELS>
void multiply(const Tile& t) {
  const int32_t* x = static_cast<const int32_t*>(t.x);
  const char* w[2] = {static_cast<const char*>(t.w), static_cast<const char*>(t.w2)};
  __m512 sums[PANELS][R];
#pragma GCC unroll 2
  for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[p][r] = _mm512_setzero_ps();
  for (int u = 0; u < t.units; ++u, x += R) {
    __m512i weights[PANELS];
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) weights[p] = _mm512_loadu_si512(w[p] + 64 * u);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i value = _mm512_set1_epi32(x[r]);
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; ++p) dot(sums[p][r], weights[p], value);
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(t.out + (p * MAX_ROWS + r) * CHANNELS, sums[p][r]);
}

template <int R>
struct One {
  static void run(const Tile& t) { multiply<R, 1>(t); }
};
template <int R>
struct Two {
  static void run(const Tile& t) { multiply<R, 2>(t); }
};

void round(const float* x, int64_t k, int8_t* out) {
  for (int64_t i = 0; i < k; i += 16) {
    const __mmask16 there = static_cast<__mmask16>(k - i >= 16 ? 0xffff : (1u << (k - i)) - 1);
    const __m256i made = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, x + i));
    _mm256_mask_storeu_epi16(out + 2 * i, there, made);
  }
}

const Halves HALVES = {BF16_PANELS, ROWS, round, Table<One, ROWS>::run, Table<Two, ROWS>::run};

}  // namespace

const Halves* avx512bf16_halves() { return &HALVES; }

}  // namespace lowbit
