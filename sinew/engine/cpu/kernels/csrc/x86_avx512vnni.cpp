// AVX-512 VNNI. The instruction vpdpbusd adds 4 products of unsigned codes with signed activations to a 32-bit lane,
// without saturation for any width of the codes. Codes of 8 bits are made unsigned by a bias of 128, which the offsets
// subtract again. A vector has 16 channels x 4 values of k.
#include <immintrin.h>

#include "jpeg.h"
#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 12;  // this number of sums hides the latency of vpdpbusd (5 cycles, two per cycle)

// The product is written in assembler. With the intrinsic, gcc 12 copies every sum to another register and back, which
// halves the rate.
inline void dot(__m512i& sum, __m512i codes, __m512i x) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
#else  // emulated
  sum = _mm512_dpbusd_epi32(sum, codes, x);
#endif
}

template <int R>
struct Multiply {
  static void run(const Tile& t) {
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const uint8_t* w = static_cast<const uint8_t*>(t.w);
    __m512 out[R];
    for (int r = 0; r < R; ++r) out[r] = _mm512_setzero_ps();
    for (int g = 0; g < t.groups; ++g) {
      __m512i sums[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_si512();
      for (int u = 0; u < t.units; ++u, x += R, w += 4 * CHANNELS) {
        const __m512i codes = _mm512_loadu_si512(w);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) dot(sums[r], codes, _mm512_set1_epi32(x[r]));
      }
      const __m512 scales = _mm512_loadu_ps(t.scales + g * CHANNELS);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {  // subtract after the loop, where the broadcast can read its operand from memory
        const __m512i whole = _mm512_sub_epi32(sums[r], _mm512_set1_epi32(t.offsets[g * R + r]));
        out[r] = _mm512_add_ps(out[r], _mm512_mul_ps(_mm512_cvtepi32_ps(whole), scales));
      }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(t.out + r * CHANNELS, out[r]);
  }
};

// Loads are as scarce as multipliers: one panel takes 13 loads for 12 products, two panels take 14 loads for 24
// products.
template <int R>
struct MultiplyTwo {
  static void run(const Tile& t) {
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const uint8_t *w = static_cast<const uint8_t*>(t.w), *w2 = static_cast<const uint8_t*>(t.w2);
    __m512i sums[R], sums2[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = sums2[r] = _mm512_set1_epi32(-t.offsets[r]);
    for (int u = 0; u < t.units; ++u, x += R, w += 4 * CHANNELS, w2 += 4 * CHANNELS) {
      const __m512i codes = _mm512_loadu_si512(w), codes2 = _mm512_loadu_si512(w2);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512i value = _mm512_set1_epi32(x[r]);
        dot(sums[r], codes, value);
        dot(sums2[r], codes2, value);
      }
    }
    const __m512 scales = _mm512_loadu_ps(t.scales), scales2 = _mm512_loadu_ps(t.scales + CHANNELS);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(t.out + r * CHANNELS, _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r]), scales));
      _mm512_storeu_ps(t.out + (MAX_ROWS + r) * CHANNELS, _mm512_mul_ps(_mm512_cvtepi32_ps(sums2[r]), scales2));
    }
  }
};

inline __m128i block(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Compute expand_panel() for Q4_0 in units of 4, for sixteen rows. Their blocks of 16 bytes are transposed as they are
// stored, with two codes per byte.
void expand_nibbles(const Weights& w, int64_t channel, uint8_t* panel, float* scales) {
  const int64_t bytes = row_bytes(Q4_0, w.k);
  const uint8_t* from = w.data + channel * bytes;
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t at = 0; at < w.k; at += 32, from += 18, panel += 32 * CHANNELS) {
    expand_scales<Q4_0>(w, channel, at, at + 32, scales);
    // rows has the rows i, 4 + i, 8 + i and 12 + i. units has the 4 low codes, then the 4 high codes of each row.
    __m512i rows[4], units[4];
    for (int i = 0; i < 4; ++i) {
      const uint8_t* row = from + 2 + i * bytes;
      rows[i] = _mm512_inserti32x4(_mm512_castsi128_si512(block(row)), block(row + 4 * bytes), 1);
      rows[i] = _mm512_inserti32x4(rows[i], block(row + 8 * bytes), 2);
      rows[i] = _mm512_inserti32x4(rows[i], block(row + 12 * bytes), 3);
    }
    for (int h = 0; h < 2; ++h) {
      const __m512i a = h ? _mm512_unpackhi_epi32(rows[0], rows[1]) : _mm512_unpacklo_epi32(rows[0], rows[1]);
      const __m512i b = h ? _mm512_unpackhi_epi32(rows[2], rows[3]) : _mm512_unpacklo_epi32(rows[2], rows[3]);
      units[2 * h] = _mm512_unpacklo_epi64(a, b);
      units[2 * h + 1] = _mm512_unpackhi_epi64(a, b);
    }
    for (int u = 0; u < 4; ++u) {
      _mm512_storeu_si512(panel + 64 * u, _mm512_and_si512(units[u], low));
      _mm512_storeu_si512(panel + 64 * (4 + u), _mm512_and_si512(_mm512_srli_epi16(units[u], 4), low));
    }
  }
}

void expand_avx512(const Weights& w, int64_t channel, void* panel, float* scales, int32_t* bases) {
  if (w.format == Q4_0 && rows_of(w, channel) == CHANNELS)
    return expand_nibbles(w, channel, static_cast<uint8_t*>(panel), scales);
  expand<4, 4, 128>(w, channel, panel, scales, bases);
}

const auto MULTIPLY = Table<Multiply, ROWS>::run, MULTIPLY_TWO = Table<MultiplyTwo, ROWS>::run;
const Kernels AVX512VNNI = {
    "avx512vnni", {ROWS, ROWS, ROWS, ROWS}, 0, 4, 4, 128, {MULTIPLY, MULTIPLY, MULTIPLY, MULTIPLY}, quantize, expand_avx512, pack<4, 4>,
    finish, resize, resample, jpeg, nullptr, {MULTIPLY_TWO, nullptr, MULTIPLY_TWO, nullptr},
};

}  // namespace

const Kernels* avx512vnni_kernels() { return &AVX512VNNI; }

}  // namespace lowbit
