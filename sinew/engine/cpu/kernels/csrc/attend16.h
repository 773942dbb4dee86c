// Attention with products of 16-bit integers (AVX2), for layers whose other products are rounded to 8 bits. With heads
// of 64 values, queries and keys are rounded to 13.5 bits per row, attention weights to 14 bits per row, and values to
// 11 bits per column. This is finer than the 8 bits of the projections before and after the attention. Sums are exact
// until they are converted to floats.
//
// Two vpmaddwd replace four fused multiply-adds, because one multiplication makes two products (x86_avx2.cpp):
//
//   (x0 + w2) (x2 + w0) = x0 w0 + x2 w2  +  x0 x2 + w0 w2        and the same with 1 and 3.
//
// Factors fit 16 bits and results are less than 2^31. Intermediate sums are correct modulo 2^32. Queries, scores and
// weights are stored in tiles of ROWS16 rows, so that a product reads and writes them sequentially.
#pragma once
#include "floats.h"
#include "pairs.h"

namespace lowbit {
namespace {

// ROWS16 is the number of rows of a tile. TOGETHER16 rows share a block of keys in the cache.
constexpr int ROWS16 = 4, TOGETHER16 = TILES * TILE;
constexpr int AHEAD = 8;  // number of rows between the row in use and the row that is prefetched
constexpr int16_t LINEAR = 11389, SQUARE = 3730, CUBE = 1262;  // coefficients of 2^x for 0 <= x < 1, times 2^14
constexpr int VALUES16 = 1023;  // attention weights are at most 2^14, so sums of 128 (DEPTH) products stay below 2^31

inline __m256i load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store16(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// Compute the sums of a tile [units][ROWS16] times a panel [units][COLUMNS], minus the terms of single rows and
// columns. The result is floats [ROWS16][COLUMNS]: with STEPS, the sums are multiplied by `steps`. Otherwise they are
// added to `out` if `more`. A unit is two values in 32 bits. The number of units is a multiple of 2.
template <bool STEPS>
__attribute__((noinline)) void tile16(const int32_t* x, const int32_t* panel, int64_t units, const int32_t* rows,
                                      const int32_t* columns, const float* steps, float* out, bool more) {
  __m256i sums[ROWS16][2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256i column = _mm256_sub_epi32(_mm256_setzero_si256(), load16(columns + 8 * h));
#pragma GCC unroll 4
    for (int r = 0; r < ROWS16; ++r) sums[r][h] = _mm256_sub_epi32(column, _mm256_set1_epi32(rows[r]));
  }
  for (int64_t u = 0; u < units; u += 2, x += 2 * ROWS16, panel += 2 * COLUMNS) {
    const __m256i even[2] = {load16(panel), load16(panel + 8)}, odd[2] = {load16(panel + 16), load16(panel + 24)};
#pragma GCC unroll 4
    for (int r = 0; r < ROWS16; ++r) add_products(sums[r][0], sums[r][1], x + r, x + ROWS16 + r, even, odd);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS16; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h, out += LANES) {
      const Floats sum = (Floats)_mm256_cvtepi32_ps(sums[r][h]);
      store(out, STEPS ? sum * load(steps + h * LANES) : more ? load(out) + sum : sum);
    }
}

// Prefetch a row. The hardware does not prefetch it, because rows of other heads are between the rows of one head.
inline void fetch(const float* row, int64_t size) {
  for (int64_t d = 0; d < size; d += COLUMNS) __builtin_prefetch(row + d);
}

inline int32_t sum_of(__m256i v) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// Round a row of floats [size] to int16 [padded], so that the largest magnitude becomes `limit`. `padded` is a multiple
// of 16. Return the value of one integer step, or NaN if a value is not finite. `alone` receives the term of this row
// alone.
inline float round16(const float* x, int64_t size, int64_t padded, int limit, int32_t* out, int32_t* alone) {
  alignas(32) float last[COLUMNS] = {};
  const int64_t whole = size / COLUMNS * COLUMNS;
  if (whole < size) std::memcpy(last, x + whole, (size - whole) * sizeof(float));
  const auto at = [&](int64_t i, int h) { return _mm256_loadu_ps((i < whole ? x + i : last) + h * LANES); };
  const __m256i absolute = _mm256_set1_epi32(0x7fffffff);
  // As integers, the bits of magnitudes have the same order as the magnitudes, with NaN last.
  __m256i tops = _mm256_setzero_si256();
  for (int64_t i = 0; i < padded; i += COLUMNS)
    for (int h = 0; h < 2; ++h) tops = _mm256_max_epi32(tops, _mm256_and_si256(_mm256_castps_si256(at(i, h)), absolute));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(tops), _mm256_extracti128_si256(tops, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  const int32_t top = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  *alone = 0;
  if (top >= 0x7f800000) {
    std::memset(out, 0, padded * sizeof(int16_t));
    return __builtin_nanf("");
  }
  float largest;
  std::memcpy(&largest, &top, 4);
  largest = largest > 1e-30f ? largest : 1e-30f;
  const __m256 scale = _mm256_set1_ps(static_cast<float>(limit) / largest);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < padded; i += COLUMNS) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(at(i, 0), scale));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(at(i, 1), scale));
    const __m256i units = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    store16(out + i / 2, units);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(units, _mm256_srli_epi64(units, 32)));
  }
  *alone = sum_of(sums);
  return largest / static_cast<float>(limit);
}

// Copy the units of a row to places with a distance of `apart` units.
inline void place(const int32_t* row, int64_t units, int32_t* to, int64_t apart) {
  for (int64_t u = 0; u < units; ++u) std::memcpy(to + u * apart, row + u, 4);
}

// Store the keys of one head as panels [padded / COLUMNS][units][COLUMNS], with the term of each key alone and the step
// of each key. Return whether all keys are finite.
inline bool keys16(const Attention& a, int64_t b, int64_t head, int64_t padded, int64_t units, int limit, int32_t* panels,
                   int32_t* alone, float* steps, int32_t* row) {
  bool finite = true;
  for (int64_t i = 0; i < padded; ++i) {
    alone[i] = 0;
    steps[i] = 0.0f;
    if (i + AHEAD < a.keys) fetch(a.key(b, head, i + AHEAD), a.size);
    if (i < a.keys)
      steps[i] = round16(a.key(b, head, i), a.size, 2 * units, limit, row, alone + i);
    else
      std::memset(row, 0, 4 * units);
    finite = finite && steps[i] == steps[i];
    place(row, units, panels + i / COLUMNS * units * COLUMNS + i % COLUMNS, COLUMNS);
  }
  return finite;
}

// Store the values of one head as panels [width / COLUMNS][padded / 2][COLUMNS]. A unit has the values of two keys. Of
// each 16 keys, the units begin with the keys 0, 4, 2, 6, 8, 12, 10, 14. `alone` receives the terms of single columns
// for each block of DEPTH keys, [blocks][width], and `steps` the steps of the columns.
inline void values16(const Attention& a, int64_t b, int64_t head, int64_t padded, int64_t width, int32_t* panels, int32_t* alone,
                     float* steps) {
  for (int64_t d = 0; d < width; d += LANES) {
    const int there = static_cast<int>(a.size - d < LANES ? (a.size > d ? a.size - d : 0) : LANES);
    alignas(32) int32_t lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = i < there ? -1 : 0;
    const __m256i mask = load16(lanes), absolute = _mm256_set1_epi32(0x7fffffff);
    const auto row = [&, mask](int64_t i) {
      return i < a.keys ? _mm256_maskload_ps(a.value(b, head, i) + d, mask) : _mm256_setzero_ps();
    };
    __m256i top = _mm256_setzero_si256();
    for (int64_t i = 0; i < a.keys; ++i) {
      if (i + AHEAD < a.keys) __builtin_prefetch(a.value(b, head, i + AHEAD) + d);
      top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(row(i)), absolute));
    }
    const __m256i broken = _mm256_cmpgt_epi32(top, _mm256_set1_epi32(0x7f7fffff));
    const __m256 largest = _mm256_max_ps(_mm256_castsi256_ps(top), _mm256_set1_ps(1e-30f));
    const __m256 limit = _mm256_set1_ps(VALUES16);
    const __m256 scale = _mm256_andnot_ps(_mm256_castsi256_ps(broken), _mm256_div_ps(limit, largest));
    const __m256 nan = _mm256_set1_ps(__builtin_nanf(""));
    _mm256_storeu_ps(steps + d, _mm256_blendv_ps(_mm256_div_ps(largest, limit), nan, _mm256_castsi256_ps(broken)));
    int32_t* to = panels + d / COLUMNS * (padded / 2) * COLUMNS + d % COLUMNS;
    const auto rounded = [&](int64_t i) { return _mm256_cvtps_epi32(_mm256_mul_ps(row(i), scale)); };
    for (int64_t block = 0; block < padded; block += DEPTH, alone += width) {
      __m256i sum = _mm256_setzero_si256(), before = sum;
      for (int64_t i = block; i < padded && i < block + DEPTH; i += COLUMNS)
        for (int u = 0; u < COLUMNS / 2; ++u, to += COLUMNS) {
          const int64_t j = i + u % 2 * 4 + u / 2 % 2 * 2 + u / 4 * 8;
          const __m256i unit = _mm256_blend_epi16(rounded(j), _mm256_slli_epi32(rounded(j + 1), 16), 0xaa);
          store16(to, unit);
          if (u % 2) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(before, unit));
          before = unit;
        }
      store16(alone + d, sum);
    }
    alone -= (padded + DEPTH - 1) / DEPTH * width;
  }
}

// Compute 2^y * 2^14 in 16 bits, with y = 16 scores times `factor` plus `start`, in steps of 2^-11. `start` is at most
// zero. The order of the keys is 0 to 3, 8 to 11, 4 to 7, 12 to 15. The relative error is at most 2e-4. Values of y
// below -16 give 0. The largest result is one step below 2^14.
inline __m256i weights16(const float* scores, Floats factor, Floats start) {
  const auto steps = [&](int h) { return _mm256_cvtps_epi32((__m256)(load(scores + h * LANES) * factor + start)); };
  const __m256i x = _mm256_min_epi16(_mm256_packs_epi32(steps(0), steps(1)), _mm256_set1_epi16(-1));
  const __m256i part = _mm256_srli_epi16(_mm256_slli_epi16(x, 5), 1);  // the fraction of x, times 2^15
  __m256i p = _mm256_add_epi16(_mm256_mulhrs_epi16(part, _mm256_set1_epi16(CUBE)), _mm256_set1_epi16(SQUARE));
  p = _mm256_add_epi16(_mm256_mulhrs_epi16(part, p), _mm256_set1_epi16(LINEAR));
  p = _mm256_add_epi16(_mm256_mulhrs_epi16(part, p), _mm256_set1_epi16(1 << 14));
  // The number 2^(15 + whole) has one bit, which is in the low byte or in the high byte.
  const __m256i low = _mm256_set1_epi16(0x00ff), places = _mm256_set1_epi16(0x070f), whole = _mm256_srai_epi16(x, 11);
  const __m256i both = _mm256_add_epi8(_mm256_or_si256(_mm256_and_si256(whole, low), _mm256_slli_epi16(whole, 8)), places);
  const __m256i bits = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
  return _mm256_mulhrs_epi16(p, _mm256_shuffle_epi8(bits, both));
}

// Convert the scores of a tile of queries, [padded / COLUMNS][ROWS16][COLUMNS], to attention weights in 16 bits. The
// scores must be multiplied by `factors`. The weights overwrite the scores as [padded / 2][ROWS16], in the order of
// values16(). `alone` receives the terms of single rows for each block of DEPTH keys, [blocks][ROWS16]. `totals`
// receives the sums of the weights, or NaN if a score is NaN. The code searches for NaN only if the keys are not
// `finite`.
inline void weights16(float* scores, const uint8_t* const* seen, int64_t keys, int64_t padded, bool finite, const float* factors,
                      int32_t* alone, float* totals) {
  constexpr int STEP = ROWS16 * COLUMNS;
  const float none = -__builtin_inff();
  Floats factor[ROWS16], start[ROWS16];
  for (int r = 0; r < ROWS16; ++r) {
    float *row = scores + r * COLUMNS, *at = row;
    Floats tops[2] = {all(none), all(none)};
    for (int64_t i = 0; i < padded; i += COLUMNS, at += STEP) {
      Floats both[2] = {load(at), load(at + LANES)};
      if (seen[r] != nullptr || i + COLUMNS > keys) {
        uint8_t last[COLUMNS];
        const bool whole = i + COLUMNS <= keys;
        for (int64_t j = 0; j < COLUMNS && !whole; ++j) last[j] = i + j < keys && (seen[r] == nullptr || seen[r][i + j]);
        const uint8_t* sees = whole ? seen[r] + i : last;
        for (int h = 0; h < 2; ++h) {
          const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(sees + h * LANES)));
          const __m256i hidden = _mm256_cmpeq_epi32(lanes, _mm256_setzero_si256());
          both[h] = (Floats)_mm256_blendv_ps((__m256)both[h], (__m256)all(none), _mm256_castsi256_ps(hidden));
          store(at + h * LANES, both[h]);
        }
      }
      for (int h = 0; h < 2; ++h) tops[h] = largest(both[h], tops[h]);
    }
    const Floats top = largest(tops[0], tops[1]);
    float most = top[0];
    for (int i = 1; i < LANES; ++i) most = top[i] > most ? top[i] : most;
    totals[r] = factors[r] - factors[r] + (most == none ? 0.0f : most - most);  // NaN if a score is NaN or infinite
    for (int64_t i = 0; i < keys; ++i) {
      float& score = row[i / COLUMNS * STEP + i % COLUMNS];
      if (!finite && score != score) totals[r] = score;
      // As in the reference, a row without visible keys averages all values.
      if (most == none) score = 0.0f;
      if (finite && most != none) break;
    }
    most = most == none ? 0.0f : most;
    const float steps = (factors[r] < 1e-37f ? 1e-37f : factors[r]) * (1.44269504f * 2048.0f);
    factor[r] = all(steps);
    start[r] = all(-most * steps);
  }
  __m256i sums[ROWS16] = {};
  int32_t* to = reinterpret_cast<int32_t*>(scores);
  for (int64_t block = 0; block < padded; block += DEPTH, alone += ROWS16) {
    __m128i pairs = _mm_setzero_si128();
    for (int64_t i = block; i < padded && i < block + DEPTH; i += COLUMNS, scores += STEP, to += STEP / 2) {
      __m256i units[ROWS16];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS16; ++r) {
        units[r] = weights16(scores + r * COLUMNS, factor[r], start[r]);
        sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(units[r], _mm256_set1_epi16(1)));
      }
      const __m256i a = _mm256_unpacklo_epi32(units[0], units[1]), b = _mm256_unpacklo_epi32(units[2], units[3]);
      const __m256i c = _mm256_unpackhi_epi32(units[0], units[1]), d = _mm256_unpackhi_epi32(units[2], units[3]);
      const __m256i turned[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d),
                                 _mm256_unpackhi_epi64(c, d)};
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {  // units u and u + 4 of all rows
        store16(to + 2 * ROWS16 * u, turned[u]);
        const __m128i both = _mm_madd_epi16(_mm256_castsi256_si128(turned[u]), _mm256_extracti128_si256(turned[u], 1));
        pairs = _mm_add_epi32(pairs, both);
      }
    }
    std::memcpy(alone, &pairs, sizeof pairs);
  }
  for (int r = 0; r < ROWS16; ++r)
    for (int i = 0; i < LANES; ++i) totals[r] += static_cast<float>(((Bits)sums[r])[i]);
}

// Compute attend(). The error is at most 4e-3 of the largest value, and about a tenth of that for random numbers.
void attend16(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  const int64_t padded = round_up(a.keys, COLUMNS), width = round_up(a.size, COLUMNS);
  const int64_t units = width / 2, stride = row_stride(a.keys), blocks = (padded + DEPTH - 1) / DEPTH;
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
  int32_t* key_alone = reinterpret_cast<int32_t*>(take(padded));
  float* key_steps = reinterpret_cast<float*>(take(padded));
  int32_t* value_alone = reinterpret_cast<int32_t*>(take(blocks * width));
  float* value_steps = reinterpret_cast<float*>(take(width));
  int32_t* weight_alone = reinterpret_cast<int32_t*>(take(TOGETHER16 * blocks));
  int32_t* queries = reinterpret_cast<int32_t*>(take(TOGETHER16 * units));
  float* out = reinterpret_cast<float*>(take(TOGETHER16 * width));
  int32_t* line = reinterpret_cast<int32_t*>(take(units));
  const bool finite = keys16(a, b, head, padded, units, limit, keys, key_alone, key_steps, line);
  values16(a, b, head, padded, width, values, value_alone, value_steps);
  for (int64_t row = first; row < last; row += TOGETHER16) {
    const int rows = static_cast<int>(last - row < TOGETHER16 ? last - row : TOGETHER16);
    // The number of rows including the unused rows of the last tile.
    const int behind = (rows + ROWS16 - 1) / ROWS16 * ROWS16;
    int32_t alone[TOGETHER16];
    float factors[TOGETHER16], totals[TOGETHER16];
    for (int r = 0; r < behind; ++r) {  // unused rows of the last tile get a copy of the last row
      const float* q = a.query(b, head, row + (r < rows ? r : rows - 1));
      factors[r] = a.scale * round16(q, a.size, 2 * units, limit, line, alone + r);
      place(line, units, queries + r / ROWS16 * ROWS16 * units + r % ROWS16, ROWS16);
    }
    for (int64_t i = 0; i < padded; i += COLUMNS)
      for (int r = 0; r < behind; r += ROWS16)
        tile16<true>(queries + r * units, keys + i * units, units, alone + r, key_alone + i, key_steps + i,
                     scores + r * stride + i * ROWS16, false);
    for (int r = 0; r < behind; r += ROWS16) {
      const uint8_t* seen[ROWS16];
      for (int s = 0; s < ROWS16; ++s) {
        seen[s] = r + s >= rows ? nullptr : a.seen(b, row + r + s);
        if (row + TOGETHER16 + r + s < last) fetch(a.query(b, head, row + TOGETHER16 + r + s), a.size);
      }
      weights16(scores + r * stride, seen, a.keys, padded, finite, factors + r, weight_alone + r * blocks, totals + r);
    }
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t d = 0; d < width; d += COLUMNS)
        for (int r = 0; r < behind; r += ROWS16) {
          const int64_t i = block * DEPTH, there = padded - i < DEPTH ? padded - i : DEPTH;
          tile16<false>(reinterpret_cast<const int32_t*>(scores + r * stride) + i / 2 * ROWS16,
                        values + (d * padded + i * COLUMNS) / 2, there / 2, weight_alone + r * blocks + block * ROWS16,
                        value_alone + block * width + d, nullptr, out + r * width + d * ROWS16, block > 0);
        }
    for (int r = 0; r < rows; ++r) {
      const float inverse = 1.0f / totals[r], *from = out + r / ROWS16 * ROWS16 * width + r % ROWS16 * COLUMNS;
      float* y = a.result(b, head, row + r);
      for (int64_t d = 0; d < a.size; d += COLUMNS, from += ROWS16 * COLUMNS)
        for (int64_t i = 0; i < COLUMNS && d + i < a.size; ++i) y[d + i] = from[i] * value_steps[d + i] * inverse;
    }
  }
}

}  // namespace
}  // namespace lowbit
