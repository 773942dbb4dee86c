// Attention with products of 16-bit integers (AVX-512 VNNI). The rounding is that of attend16.h for AVX2: with heads of
// 64 values, queries and keys are rounded to 13.5 bits per row, attention weights to 14 bits per row, and values to 11
// bits per column. The instruction vpdpwssd adds two products to a 32-bit sum at the rate of vpdpbusd, so this code
// does not combine two products in one multiplication.
#pragma once
#include <immintrin.h>

#include "floats.h"

namespace lowbit {
namespace {

constexpr int WIDE = 2 * CHANNELS;                       // a tile has two vectors of columns
// ROWS16 is the number of rows of a tile. TOGETHER16 rows share keys in the first-level cache.
constexpr int ROWS16 = TILE, TOGETHER16 = TILES * TILE;
constexpr int VALUES16 = 1023;  // attention weights are at most 2^14, so sums of 128 (DEPTH) products stay below 2^31
constexpr int16_t LINEAR = 11389, SQUARE = 3730, CUBE = 1262;  // coefficients of 2^x, as in attend16.h

// The product is written in assembler for the reason that x86_avx512vnni.cpp gives.
inline void dot16(__m512i& sum, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else  // emulated
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

inline __mmask16 first16(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); }

// As integers, the bits of magnitudes have the same order as the magnitudes, with NaN last.
inline __m512i magnitude(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

// Combine integers from two vectors, each within 16 bits, to one unit per lane. `low` becomes the lower half.
inline __m512i unit_of(__m512i low, __m512i high) {
  return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(high, 16));
}

// Compute the sums of ROWS16 rows, `stride` units apart, times a panel [units][WIDE], as floats. With STEPS, the sums
// are multiplied by `steps`. Otherwise they are added to `out` if `more`. A unit is two values in 32 bits.
template <bool STEPS>
__attribute__((noinline)) void tile16(const int32_t* x, int64_t stride, const int32_t* panel, int64_t units,
                                      const float* steps, float* out, int64_t out_stride, bool more) {
  __m512i sums[ROWS16][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS16; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
  for (int64_t u = 0; u < units; ++u, panel += WIDE) {
    const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + CHANNELS);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS16; ++r) {
      const __m512i unit = _mm512_set1_epi32(x[r * stride + u]);
      dot16(sums[r][0], left, unit);
      dot16(sums[r][1], right, unit);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS16; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float* to = out + r * out_stride + h * CHANNELS;
      __m512 sum = _mm512_cvtepi32_ps(sums[r][h]);
      if (STEPS) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(steps + h * CHANNELS));
      if (!STEPS && more) sum = _mm512_add_ps(sum, _mm512_loadu_ps(to));
      _mm512_storeu_ps(to, sum);
    }
}

// Round a row of floats [size] to units of int16 [padded], so that the largest magnitude becomes `limit`. `padded` is a
// multiple of WIDE. Return the value of one integer step, or NaN if a value is not finite.
inline float round16(const float* x, int64_t size, int64_t padded, int limit, int32_t* out) {
  const auto at = [=](int64_t i) { return _mm512_maskz_loadu_ps(first16(size - i), x + i); };
  __m512i tops = _mm512_setzero_si512();
  for (int64_t i = 0; i < size; i += CHANNELS) tops = _mm512_max_epi32(tops, magnitude(at(i)));
  const int32_t top = _mm512_reduce_max_epi32(tops);
  if (top >= 0x7f800000) {
    std::memset(out, 0, padded * sizeof(int16_t));
    return __builtin_nanf("");
  }
  float largest;
  std::memcpy(&largest, &top, 4);
  largest = largest > 1e-30f ? largest : 1e-30f;
  const __m512 scale = _mm512_set1_ps(static_cast<float>(limit) / largest);
  for (int64_t i = 0; i < padded; i += CHANNELS) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(at(i), scale));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 2), _mm512_cvtepi32_epi16(whole));
  }
  return largest / static_cast<float>(limit);
}

// Store the keys of one head as panels [padded / WIDE][units][WIDE], with the step of each key. `rows` has room for
// CHANNELS rows of units. Return whether all keys are finite.
inline bool keys16(const Attention& a, int64_t b, int64_t head, int64_t padded, int64_t units, int limit, int32_t* panels,
                   float* steps, int32_t* rows) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i apart = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(units)));
  bool finite = true;
  for (int64_t i = 0; i < padded; i += CHANNELS) {
    for (int64_t j = 0; j < CHANNELS; ++j) {
      const bool there = i + j < a.keys;
      steps[i + j] = there ? round16(a.key(b, head, i + j), a.size, 2 * units, limit, rows + j * units) : 0.0f;
      finite = finite && steps[i + j] == steps[i + j];
      if (!there) std::memset(rows + j * units, 0, 4 * units);
    }
    int32_t* to = panels + i / WIDE * units * WIDE + i % WIDE;
    for (int64_t u = 0; u < units; ++u) _mm512_storeu_si512(to + u * WIDE, _mm512_i32gather_epi32(apart, rows + u, 4));
  }
  return finite;
}

// Store the values of one head as panels [width / WIDE][padded / 2][WIDE], and the steps of the columns. A unit has the
// values of two keys. Of each 32 keys, the order is 0, 2, 16, 18, 4, 6, 20, 22, 8 and so on.
inline void values16(const Attention& a, int64_t b, int64_t head, int64_t padded, int64_t width, int32_t* panels, float* steps) {
  for (int64_t d = 0; d < width; d += CHANNELS) {
    const __mmask16 there = first16(a.size - d);
    const auto row = [&](int64_t i) {
      return i < a.keys ? _mm512_maskz_loadu_ps(there, a.value(b, head, i) + d) : _mm512_setzero_ps();
    };
    __m512i top = _mm512_setzero_si512();
    for (int64_t i = 0; i < a.keys; ++i) top = _mm512_max_epi32(top, magnitude(row(i)));
    const __mmask16 finite = _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(0x7f800000), top);
    const __m512 largest = _mm512_max_ps(_mm512_castsi512_ps(top), _mm512_set1_ps(1e-30f));
    const __m512 limit = _mm512_set1_ps(VALUES16);
    const __m512 scale = _mm512_maskz_div_ps(finite, limit, largest);
    _mm512_storeu_ps(steps + d, _mm512_mask_div_ps(_mm512_set1_ps(__builtin_nanf("")), finite, largest, limit));
    int32_t* to = panels + d / WIDE * (padded / 2) * WIDE + d % WIDE;
    // If a column is not finite, some of its integers are 2^31, whose lower 16 bits are zero.
    const auto rounded = [&](int64_t i) { return _mm512_cvtps_epi32(_mm512_mul_ps(row(i), scale)); };
    for (int64_t i = 0; i < padded; i += WIDE)
      for (int u = 0; u < CHANNELS; ++u, to += WIDE) {
        const int64_t j = i + u / 4 * 4 + u % 2 * 2 + u / 2 % 2 * CHANNELS;
        _mm512_storeu_si512(to, unit_of(rounded(j), rounded(j + 1)));
      }
  }
}

// Convert the scores of one query to attention weights in 16 bits, as in attend16.h. The scores must be multiplied by
// `factor`. The weights overwrite the scores, in the order of values16(). Return the sum of the weights, or NaN if a
// score is NaN. The code searches for NaN only if the keys are not `finite`.
inline float weights16(float* scores, const uint8_t* seen, int64_t keys, int64_t padded, bool finite, float factor) {
  const float none = -__builtin_inff();
  if (seen != nullptr)
    for (int64_t i = 0; i < keys; ++i) scores[i] = seen[i] ? scores[i] : none;
  for (int64_t i = keys; i < padded; ++i) scores[i] = none;
  __m512 tops[2] = {_mm512_set1_ps(none), _mm512_set1_ps(none)};
  for (int64_t i = 0; i < padded; i += WIDE)
    for (int h = 0; h < 2; ++h) tops[h] = _mm512_max_ps(_mm512_loadu_ps(scores + i + h * CHANNELS), tops[h]);
  float most = _mm512_reduce_max_ps(_mm512_max_ps(tops[0], tops[1]));
  // As in the reference, a row without visible keys averages all values.
  if (most == none) {
    for (int64_t i = 0; i < keys; ++i) scores[i] = scores[i] == none ? 0.0f : scores[i];
    most = 0.0f;
  }
  float total = factor - factor + (most - most);  // NaN if a score is NaN or infinite
  for (int64_t i = 0; i < keys && !finite; ++i) total = scores[i] == scores[i] ? total : scores[i];
  factor = (factor < 1e-37f ? 1e-37f : factor) * (1.44269504f * 2048.0f);
  const __m512 factors = _mm512_set1_ps(factor), start = _mm512_set1_ps(-most * factor);
  const auto steps = [&](const float* from) { return _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_loadu_ps(from), factors, start)); };
  __m512i sums = _mm512_setzero_si512();
  int32_t* to = reinterpret_cast<int32_t*>(scores);
  for (int64_t i = 0; i < padded; i += WIDE, to += CHANNELS) {
    __m512i x = _mm512_packs_epi32(steps(scores + i), steps(scores + i + CHANNELS));
    x = _mm512_min_epi16(x, _mm512_set1_epi16(-1));
    const __m512i part = _mm512_srli_epi16(_mm512_slli_epi16(x, 5), 1), whole = _mm512_srai_epi16(x, 11);
    __m512i p = _mm512_add_epi16(_mm512_mulhrs_epi16(part, _mm512_set1_epi16(CUBE)), _mm512_set1_epi16(SQUARE));
    p = _mm512_add_epi16(_mm512_mulhrs_epi16(part, p), _mm512_set1_epi16(LINEAR));
    p = _mm512_add_epi16(_mm512_mulhrs_epi16(part, p), _mm512_set1_epi16(1 << 14));
    const __m512i power = _mm512_sllv_epi16(_mm512_set1_epi16(1), _mm512_add_epi16(whole, _mm512_set1_epi16(15)));
    const __m512i units = _mm512_mulhrs_epi16(p, power);
    dot16(sums, units, _mm512_set1_epi16(1));
    _mm512_storeu_si512(to, units);
  }
  return total + _mm512_reduce_add_ps(_mm512_cvtepi32_ps(sums));
}

// Compute attend(). The error is at most 4e-3 of the largest value, and about a tenth of that for random numbers.
void attend16(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  const int64_t padded = round_up(a.keys, WIDE), width = round_up(a.size, WIDE);
  const int64_t units = width / 2, stride = row_stride(a.keys);
  int64_t limit = 16383;  // with this limit, the sum of `size` products is below 2^31
  while (a.size * limit * limit > 0x7fffffff) --limit;
  const auto take = [&](int64_t words) {
    char* at = memory;
    memory += words * 4;
    return at;
  };
  int32_t* keys = reinterpret_cast<int32_t*>(take(padded * units));
  int32_t* values = reinterpret_cast<int32_t*>(take(padded / 2 * width));
  float* scores = reinterpret_cast<float*>(take(TOGETHER16 * stride));
  float* key_steps = reinterpret_cast<float*>(take(padded));
  float* value_steps = reinterpret_cast<float*>(take(width));
  int32_t* queries = reinterpret_cast<int32_t*>(take(TOGETHER16 * units));
  float* out = reinterpret_cast<float*>(take(TOGETHER16 * width));
  const bool finite = keys16(a, b, head, padded, units, static_cast<int>(limit), keys, key_steps, queries);
  values16(a, b, head, padded, width, values, value_steps);
  for (int64_t row = first; row < last; row += TOGETHER16) {
    const int rows = static_cast<int>(last - row < TOGETHER16 ? last - row : TOGETHER16);
    // The number of rows including the unused rows of the last tile.
    const int behind = (rows + ROWS16 - 1) / ROWS16 * ROWS16;
    float factors[TOGETHER16], totals[TOGETHER16];
    for (int r = 0; r < behind; ++r) {  // unused rows of the last tile get a copy of the last row
      const float* q = a.query(b, head, row + (r < rows ? r : rows - 1));
      factors[r] = a.scale * round16(q, a.size, width, static_cast<int>(limit), queries + r * units);
    }
    for (int64_t i = 0; i < padded; i += WIDE)
      for (int r = 0; r < behind; r += ROWS16)
        tile16<true>(queries + r * units, units, keys + i * units, units, key_steps + i, scores + r * stride + i, stride,
                     false);
    for (int r = 0; r < behind; ++r) {
      const uint8_t* seen = r >= rows ? nullptr : a.seen(b, row + r);
      totals[r] = weights16(scores + r * stride, seen, a.keys, padded, finite, factors[r]);
    }
    for (int64_t i = 0; i < padded; i += DEPTH)
      for (int64_t d = 0; d < width; d += WIDE)
        for (int r = 0; r < behind; r += ROWS16)
          tile16<false>(reinterpret_cast<const int32_t*>(scores) + r * stride + i / 2, stride,
                        values + (d * padded + i * WIDE) / 2, (padded - i < DEPTH ? padded - i : DEPTH) / 2, nullptr,
                        out + r * width + d, width, i > 0);
    for (int r = 0; r < rows; ++r) {
      const __m512 inverse = _mm512_set1_ps(1.0f / totals[r]);
      float* y = a.result(b, head, row + r);
      for (int64_t d = 0; d < a.size; d += CHANNELS) {
        const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(out + r * width + d), _mm512_loadu_ps(value_steps + d));
        _mm512_mask_storeu_ps(y + d, first16(a.size - d), _mm512_mul_ps(values, inverse));
      }
    }
  }
}

}  // namespace
}  // namespace lowbit
