// AVX2. A vector holds 8 channels x 4 values of k; the activations of one row are broadcast against it.
//
// vpmaddubsw multiplies unsigned codes with signed activations and adds pairs in 16 bits, where it saturates. Codes up
// to 2 (ternary) and 15 (4 bits) stay far from that, so that pairs may also be summed in 16 bits: two instructions for 32
// products instead of three. Largest sums: 64 units x 2 x 2 x 128 = 32768 below zero (and 127: 32512 above); 8 units x
// 2 x 15 x 127 = 30480. Codes of 8 bits would saturate, so they and the activations are widened to 16 bits: exact.
#include <immintrin.h>

#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 6;  // x 2 vectors: 12 sums, 2 codes, 1 broadcast and 1 product make 16 registers

inline __m256i broadcast(const int32_t* x) { return _mm256_set1_epi32(*x); }
inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256 floats(const float* p) { return _mm256_loadu_ps(p); }

// As assembler, because gcc would otherwise reorder the sums into a tree, which no number of registers holds.
inline void add16(__m256i& sum, __m256i pairs) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(pairs)); }
inline void add32(__m256i& sum, __m256i pairs) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(pairs)); }

// out += scale * (sum - offset), for both vectors of a row.
inline void add_scaled(float* out, __m256i low, __m256i high, int32_t offset, const float* scales) {
  const __m256i o = _mm256_set1_epi32(offset);
  const __m256 a = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(low, o)), floats(scales));
  const __m256 b = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(high, o)), floats(scales + 8));
  _mm256_storeu_ps(out, _mm256_add_ps(floats(out), a));
  _mm256_storeu_ps(out + 8, _mm256_add_ps(floats(out + 8), b));
}

// 16-bit sums of `units` units. The loop over rows is unrolled, so the sums stay in registers.
template <int R>
inline void add_pairs(const int32_t* x, const uint8_t* w, int units, __m256i (&sums)[R][2]) {
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (int u = 0; u < units; ++u, x += R, w += 4 * CHANNELS) {
    const __m256i low = load(w), high = load(w + 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i a = broadcast(x + r);
      add16(sums[r][0], _mm256_maddubs_epi16(low, a));
      add16(sums[r][1], _mm256_maddubs_epi16(high, a));
    }
  }
}

template <int R>
struct Narrow {  // 4 bits: groups of 8 units
  static void run(const Tile& t) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const uint8_t* w = static_cast<const uint8_t*>(t.w);
    std::memset(t.out, 0, R * CHANNELS * sizeof(float));
    for (int g = 0; g < t.groups; ++g, x += 8 * R, w += 8 * 4 * CHANNELS) {
      __m256i sums[R][2];
      add_pairs<R>(x, w, 8, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        add_scaled(t.out + r * CHANNELS, _mm256_madd_epi16(sums[r][0], ones), _mm256_madd_epi16(sums[r][1], ones),
                   t.offsets[g * R + r], t.scales + g * CHANNELS);
    }
  }
};

template <int R>
struct Ternary {  // one group, in parts of 64 units
  static void run(const Tile& t) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const uint8_t* w = static_cast<const uint8_t*>(t.w);
    __m256i totals[R][2];
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm256_setzero_si256();
    for (int u = 0; u < t.units; u += 64, x += 64 * R, w += 64 * 4 * CHANNELS) {
      __m256i sums[R][2];
      add_pairs<R>(x, w, t.units - u < 64 ? t.units - u : 64, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h)
          totals[r][h] = _mm256_add_epi32(totals[r][h], _mm256_madd_epi16(sums[r][h], ones));
    }
    std::memset(t.out, 0, R * CHANNELS * sizeof(float));
    for (int r = 0; r < R; ++r)
      add_scaled(t.out + r * CHANNELS, totals[r][0], totals[r][1], t.offsets[r], t.scales);
  }
};

template <int R>
struct Wide {  // 8 bits, as 16: a unit is 2 values of k
  static void run(const Tile& t) {
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const uint8_t* w = static_cast<const uint8_t*>(t.w);
    std::memset(t.out, 0, R * CHANNELS * sizeof(float));
    for (int g = 0; g < t.groups; ++g) {
      __m256i sums[R][2];
      for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
      for (int u = 0; u < t.units; ++u, x += R, w += 4 * CHANNELS) {
        const __m256i low = load(w), high = load(w + 32);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256i a = broadcast(x + r);
          add32(sums[r][0], _mm256_madd_epi16(low, a));
          add32(sums[r][1], _mm256_madd_epi16(high, a));
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        add_scaled(t.out + r * CHANNELS, sums[r][0], sums[r][1], 0, t.scales + g * CHANNELS);
    }
  }
};

const Kernels AVX2 = {
    "avx2", ROWS, 0, 4, 2, 0,
    {Table<Ternary, ROWS>::run, Table<Narrow, ROWS>::run, Table<Wide, ROWS>::run},
    quantize, expand<4, 2, 0>, pack<4, 2>,
};

}  // namespace

const Kernels* avx2_kernels() { return &AVX2; }

}  // namespace lowbit
