// AVX2. A vector has 8 channels x 4 values of k. The activations of one row are broadcast to it.
//
// The instruction vpmaddubsw multiplies unsigned codes by signed activations and adds pairs in 16 bits, where it
// saturates. Codes up to 2 (ternary) and 15 (4 bits) cannot reach saturation, so pairs may also be summed in 16 bits:
// two instructions for 32 products instead of three. The largest sums are 64 units x 2 x 2 x 128 = 32768 below zero
// (with 127, 32512 above zero), and 8 units x 2 x 15 x 127 = 30480.
//
// Codes of 8 bits would saturate, so their products have 16 bits. One multiplication makes two products (Winograd
// 1968). For four values of k:
//
//   (x0 + w2) (x2 + w0) = x0 w0 + x2 w2  +  x0 x2 + w0 w2        and the same with 1 and 3
//
// One vpmaddwd therefore makes four products instead of two, for two more additions. The terms of a row alone and of a
// channel alone are computed once for each (`pairs`, `bases`) and subtracted. Zen and Intel cores multiply with two of
// their four vector pipes and add with three or four, so the code is faster. All of it is exact: factors fit 9 bits,
// and sums are correct modulo 2^32, which is enough for the result.
#include <immintrin.h>

#include "jpeg.h"
#include "pairs.h"
#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 6;  // 6 rows x 2 vectors: 12 sums, 2 vectors of codes, 1 broadcast and 1 product use 16 registers
constexpr int PAIRED = 4;  // 4 rows x 2 vectors: 8 sums, 4 vectors of codes, 2 broadcasts and 2 factors use 16 registers

inline __m256i broadcast(const int32_t* x) { return _mm256_set1_epi32(*x); }
inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i widen(const void* p) { return _mm256_cvtepi8_epi16(half(p)); }
inline __m256i widen_half(__m256i v, int h) {
  return _mm256_cvtepi8_epi16(h ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v));
}
inline __m256 floats(const float* p) { return _mm256_loadu_ps(p); }

// The additions are written in assembler, because gcc would otherwise reorder the sums into a tree that needs too many
// registers.
inline void add16(__m256i& sum, __m256i pairs) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(pairs)); }
inline void add32(__m256i& sum, __m256i pairs) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(pairs)); }

// Compute out += scale * (sum - offset) for both vectors of a row. With `fresh`, `out` has no values yet.
inline void add_scaled(float* out, __m256i low, __m256i high, int32_t offset, const float* scales, bool fresh) {
  const __m256i o = _mm256_set1_epi32(offset);
  __m256 a = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(low, o)), floats(scales));
  __m256 b = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(high, o)), floats(scales + 8));
  if (!fresh) {
    a = _mm256_add_ps(floats(out), a);
    b = _mm256_add_ps(floats(out + 8), b);
  }
  _mm256_storeu_ps(out, a);
  _mm256_storeu_ps(out + 8, b);
}

// Compute 16-bit sums of `units` units. The loop over rows is unrolled, so the sums stay in registers.
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
struct Narrow {  // codes of 4 bits in groups of 8 units
  static void run(const Tile& t) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const uint8_t* w = static_cast<const uint8_t*>(t.w);
    for (int g = 0; g < t.groups; ++g, x += 8 * R, w += 8 * 4 * CHANNELS) {
      __m256i sums[R][2];
      add_pairs<R>(x, w, 8, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        add_scaled(t.out + r * CHANNELS, _mm256_madd_epi16(sums[r][0], ones), _mm256_madd_epi16(sums[r][1], ones),
                   t.offsets[g * R + r], t.scales + g * CHANNELS, g == 0);
    }
  }
};

template <int R>
struct Ternary {  // ternary codes in one group, in parts of 64 units
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
    for (int r = 0; r < R; ++r)
      add_scaled(t.out + r * CHANNELS, totals[r][0], totals[r][1], t.offsets[r], t.scales, true);
  }
};

template <int R>
// Codes of 8 bits in groups, whose ends cost more than pairs save. A unit has 2 values of k.
struct Wide {
  static void run(const Tile& t) {
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const __m256i* w = static_cast<const __m256i*>(t.w);
    for (int g = 0; g < t.groups; ++g) {
      __m256i sums[R][2];
      for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
      for (int u = 0; u < t.units; ++u, x += R, w += 2) {
        const __m256i low = load(w), high = load(w + 1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256i a = broadcast(x + r);
          add32(sums[r][0], _mm256_madd_epi16(low, a));
          add32(sums[r][1], _mm256_madd_epi16(high, a));
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        add_scaled(t.out + r * CHANNELS, sums[r][0], sums[r][1], 0, t.scales + g * CHANNELS, g == 0);
    }
  }
};

template <int R>
struct Paired {  // codes of 8 bits in one group: a unit has 2 values of k, and two units make a pair
  static void run(const Tile& t) {
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const __m256i* w = static_cast<const __m256i*>(t.w);
    __m256i sums[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) sums[r][h] = _mm256_sub_epi32(_mm256_setzero_si256(), load(t.bases + 8 * h));
    for (int u = 0; u < t.units; u += 2, x += 2 * R, w += 4) {
      const __m256i even[2] = {load(w), load(w + 1)}, odd[2] = {load(w + 2), load(w + 3)};
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add_products(sums[r][0], sums[r][1], x + r, x + R + r, even, odd);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      add_scaled(t.out + r * CHANNELS, sums[r][0], sums[r][1], t.offsets[r], t.scales, true);
  }
};

// Return the sum of x0 x2 + x1 x3 over all groups of four values. k must be a multiple of 8.
int32_t pairs(const int8_t* x, int64_t k) {
  __m256i sum = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    const __m256i wide = widen(x + i);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(wide, _mm256_shuffle_epi32(wide, 0xb1)));  // each pair is added twice
  }
  int32_t parts[8], total = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sum);
  for (int p = 0; p < 8; p += 2) total += parts[p];
  for (; i < k; i += 4) total += x[i] * x[i + 2] + x[i + 1] * x[i + 3];
  return total;
}

// Compute pack_block<2> for four rows, eight units at a time. Each such part becomes 16 bytes.
void pack_pairs(const int8_t* x, int64_t k, int rows, int width, void* block) {
  if (width != PAIRED || rows != PAIRED) return pack_block<2>(x, k, rows, width, block);
  __m128i* to = static_cast<__m128i*>(block);
  int64_t i = 0;
  for (; i + 16 <= k; i += 16, to += 8) {
    const __m256i a = widen(x + i), b = widen(x + k + i), c = widen(x + 2 * k + i), d = widen(x + 3 * k + i);
    const __m256i low[2] = {_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)};
    const __m256i high[2] = {_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)};
    const __m256i units[4] = {_mm256_unpacklo_epi64(low[0], low[1]), _mm256_unpackhi_epi64(low[0], low[1]),
                              _mm256_unpacklo_epi64(high[0], high[1]), _mm256_unpackhi_epi64(high[0], high[1])};
    for (int u = 0; u < 4; ++u) {
      _mm_storeu_si128(to + u, _mm256_castsi256_si128(units[u]));
      _mm_storeu_si128(to + 4 + u, _mm256_extracti128_si256(units[u], 1));
    }
  }
  for (; i < k; i += 2, ++to) {
    int16_t unit[PAIRED][2];
    for (int r = 0; r < PAIRED; ++r)
      for (int e = 0; e < 2; ++e) unit[r][e] = x[r * k + i + e];
    std::memcpy(to, unit, sizeof unit);
  }
}

void pack_avx2(const int8_t* x, int64_t k, int rows, int width, int wide, void* block) {
  if (wide)
    pack_pairs(x, k, rows, width, block);
  else
    pack_block<4>(x, k, rows, width, block);
}

// Convert 16 bytes of 16 rows, `stride` apart, to 8 units of 2 bytes, each from 16 rows.
inline void transpose(const uint8_t* from, int64_t stride, __m256i (&units)[8]) {
  __m256i a[8], b[8], c[8];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(half(from + i * stride)), half(from + (i + 8) * stride), 1);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi16(a[i], a[i + 1]);  // rows i and i + 1: units 0 to 3
    b[i + 1] = _mm256_unpackhi_epi16(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int h = 0; h < 2; ++h) {  // four rows: units 4 h and 4 h + 1, then 4 h + 2 and 4 h + 3
      c[i + 2 * h] = _mm256_unpacklo_epi32(b[i + h], b[i + 2 + h]);
      c[i + 2 * h + 1] = _mm256_unpackhi_epi32(b[i + h], b[i + 2 + h]);
    }
  for (int i = 0; i < 4; ++i) {
    units[2 * i] = _mm256_unpacklo_epi64(c[i], c[i + 4]);
    units[2 * i + 1] = _mm256_unpackhi_epi64(c[i], c[i + 4]);
  }
}

// Compute expand_panel() for 8 bits in units of 2, widened to 16 bits. For INT8, also compute the bases.
template <int FORMAT>
void expand_pairs(const Weights& w, int64_t channel, void* panel, float* scales, int32_t* bases) {
  constexpr int PART = 16, GROUP = 32, BLOCK = 34;
  const int64_t bytes = row_bytes(FORMAT, w.k), padded = round_up(w.k, 8);
  const int rows = rows_of(w, channel);
  const uint8_t* first = w.data + channel * bytes;
  __m256i* to = static_cast<__m256i*>(panel);
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t at = 0; at < padded; at += PART, to += PART) {
    const int64_t in_row = FORMAT == INT8 ? at : at / GROUP * BLOCK + 2 + at % GROUP;
    __m256i units[PART / 2];
    if (rows == CHANNELS && at + PART <= w.k) {
      transpose(first + in_row, bytes, units);
    } else {
      alignas(16) uint8_t part[CHANNELS][PART] = {};
      for (int c = 0; c < rows; ++c)
        std::memcpy(part[c], first + c * bytes + in_row, w.k - at < PART ? w.k - at : PART);
      transpose(part[0], PART, units);
    }
    for (int u = 0; u < PART / 2 && at + 2 * u < padded; u += 2)
      for (int h = 0; h < 2; ++h) {
        const __m256i even = widen_half(units[u], h), odd = widen_half(units[u + 1], h);
        _mm256_storeu_si256(to + 2 * u + h, even);
        _mm256_storeu_si256(to + 2 * u + 2 + h, odd);
        if (FORMAT == INT8) sums[h] = _mm256_add_epi32(sums[h], _mm256_madd_epi16(even, odd));
      }
  }
  for (int h = 0; h < 2; ++h) _mm256_storeu_si256(reinterpret_cast<__m256i*>(bases + 8 * h), sums[h]);
  expand_scales<FORMAT>(w, channel, 0, w.k, scales);
}

void expand_avx2(const Weights& w, int64_t channel, void* panel, float* scales, int32_t* bases) {
  if (w.format == INT8) return expand_pairs<INT8>(w, channel, panel, scales, bases);
  if (w.format == Q8_0) return expand_pairs<Q8_0>(w, channel, panel, scales, bases);
  expand<4, 4, 0>(w, channel, panel, scales, bases);
}

const Kernels AVX2 = {
    "avx2", {ROWS, ROWS, PAIRED, ROWS}, 0, 4, 2, 0,
    {Table<Ternary, ROWS>::run, Table<Narrow, ROWS>::run, Table<Paired, PAIRED>::run,
     Table<Wide, ROWS>::run},
    quantize, expand_avx2, pack_avx2, finish, resize, resample, jpeg, pairs,
};

}  // namespace

const Kernels* avx2_kernels() { return &AVX2; }

}  // namespace lowbit
