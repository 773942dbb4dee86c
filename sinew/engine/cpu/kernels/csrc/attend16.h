// Attention in products of 16-bit integers (AVX2), for layers whose other products are rounded to 8: queries and keys are
// rounded per row to 13.5 bits where heads are 64 wide, weights of a row to 14 and values per column to 11, all of them finer
// than the 8 bits that the projections before and behind them work in. Sums are exact until they are floats again.
//
// Two vpmaddwd do what four fused multiply-adds would, and pairs (x86_avx2.cpp) make two products of one multiplication:
//
//   (x0 + w2) (x2 + w0) = x0 w0 + x2 w2  +  x0 x2 + w0 w2        and the same with 1 and 3.
//
// Factors stay within 16 bits and results below 2^31; what lies between is right modulo 2^32.
#pragma once
#include "floats.h"

namespace lowbit {
namespace {

constexpr int ROWS16 = 4, TOGETHER16 = TILES * TILE;  // rows of a tile; rows that share a block of keys in the cache
constexpr int AHEAD = 8;                    // rows that are fetched before their turn
constexpr int VALUES16 = 1023;              // weights reach 2^14, and 128 (DEPTH) products of both stay below 2^31

inline __m256i load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i broadcast16(const int32_t* unit) {  // written as two values
  int32_t both;
  std::memcpy(&both, unit, 4);
  return _mm256_set1_epi32(both);
}
inline void store16(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
// As assembler, because gcc would otherwise reorder the sums into a tree, which no number of registers holds.
inline void add32(__m256i& sum, __m256i products) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products)); }

// Sums of ROWS16 rows, `stride` units apart, times a panel [units][COLUMNS], less what a row and a column contribute
// alone: as floats times `steps`, or where there are none, added to what `out` has if `more`. A unit is two values in 32
// bits; units are a multiple of 2.
template <bool STEPS>
__attribute__((noinline)) void tile16(const int32_t* x, int64_t stride, const int32_t* panel, int64_t units, const int32_t* rows,
                   const int32_t* columns, const float* steps, float* out, int64_t out_stride, bool more) {
  __m256i sums[ROWS16][2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256i column = _mm256_sub_epi32(_mm256_setzero_si256(), load16(columns + 8 * h));
#pragma GCC unroll 4
    for (int r = 0; r < ROWS16; ++r) sums[r][h] = _mm256_sub_epi32(column, broadcast16(rows + r));
  }
  for (int64_t u = 0; u < units; u += 2, x += 2, panel += 2 * COLUMNS) {
    const __m256i even[2] = {load16(panel), load16(panel + 8)}, odd[2] = {load16(panel + 16), load16(panel + 24)};
#pragma GCC unroll 4
    for (int r = 0; r < ROWS16; ++r) {
      const __m256i first = broadcast16(x + r * stride), second = broadcast16(x + r * stride + 1);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        add32(sums[r][h], _mm256_madd_epi16(_mm256_add_epi16(first, odd[h]), _mm256_add_epi16(second, even[h])));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS16; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float* to = out + r * out_stride + h * LANES;
      const Floats sum = (Floats)_mm256_cvtepi32_ps(sums[r][h]);
      store(to, STEPS ? sum * load(steps + h * LANES) : more ? load(to) + sum : sum);
    }
}

// Rows of other heads lie between those of one, so that no hardware sees a stream in them.
inline void fetch(const float* row, int64_t size) {
  for (int64_t d = 0; d < size; d += COLUMNS) __builtin_prefetch(row + d);
}

inline int32_t sum_of(__m256i v) {
  uint32_t parts[8], total = 0;
  store16(parts, v);
  for (int i = 0; i < 8; ++i) total += parts[i];
  return static_cast<int32_t>(total);
}

// Row of floats [size] -> int16 [padded], padded a multiple of 16, `limit` at the largest; returns what one step stands
// for, NaN where a value is not finite. `alone`: what the row contributes alone.
inline float round16(const float* x, int64_t size, int64_t padded, int limit, int32_t* out, int32_t* alone) {
  alignas(32) float last[COLUMNS] = {};
  const int64_t whole = size / COLUMNS * COLUMNS;
  if (whole < size) std::memcpy(last, x + whole, (size - whole) * sizeof(float));
  const auto at = [&](int64_t i, int h) { return _mm256_loadu_ps((i < whole ? x + i : last) + h * LANES); };
  const __m256i absolute = _mm256_set1_epi32(0x7fffffff);
  __m256i tops = _mm256_setzero_si256();  // bits of absolute values are ordered as the values are, with NaN last
  for (int64_t i = 0; i < padded; i += COLUMNS)
    for (int h = 0; h < 2; ++h) tops = _mm256_max_epi32(tops, _mm256_and_si256(_mm256_castps_si256(at(i, h)), absolute));
  alignas(32) int32_t bits[LANES];
  store16(bits, tops);
  int32_t top = bits[0];
  for (int i = 1; i < LANES; ++i) top = bits[i] > top ? bits[i] : top;
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

// Keys of one head -> panels [padded / COLUMNS][units][COLUMNS], with what each contributes alone and its step.
inline void keys16(const Attention& a, int64_t b, int64_t head, int64_t padded, int64_t units, int limit, int32_t* panels,
                   int32_t* alone, float* steps, int32_t* row) {
  for (int64_t i = 0; i < padded; ++i) {
    alone[i] = 0;
    steps[i] = 0.0f;
    if (i + AHEAD < a.keys) fetch(a.key(b, head, i + AHEAD), a.size);
    if (i < a.keys)
      steps[i] = round16(a.key(b, head, i), a.size, 2 * units, limit, row, alone + i);
    else
      std::memset(row, 0, 4 * units);
    int32_t* to = panels + i / COLUMNS * units * COLUMNS + i % COLUMNS;
    for (int64_t u = 0; u < units; ++u) std::memcpy(to + u * COLUMNS, row + u, 4);
  }
}

// Values of one head -> panels [width / COLUMNS][padded / 2][COLUMNS] of units that hold keys i and i + 8 of each 16, what
// each column contributes alone to DEPTH keys, [blocks][width], and the steps of columns.
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
        for (int64_t j = i; j < i + COLUMNS / 2; ++j, to += COLUMNS) {
          const __m256i unit = _mm256_blend_epi16(rounded(j), _mm256_slli_epi32(rounded(j + COLUMNS / 2), 16), 0xaa);
          store16(to, unit);
          if (j % 2) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(before, unit));
          before = unit;
        }
      store16(alone + d, sum);
    }
    alone -= (padded + DEPTH - 1) / DEPTH * width;
  }
}

// Scores of one query, to be multiplied by `factor`, -> weights times 2^14 in 16 bits, in the order of values16(), written over
// them; what they contribute alone to each DEPTH keys; their sum is returned, NaN where a score is.
inline float weights16(float* scores, const uint8_t* seen, int64_t keys, int64_t padded, float factor, int32_t* alone) {
  const float none = -__builtin_inff();
  factor = factor < 1e-37f ? 1e-37f : factor;
  if (seen != nullptr)
    for (int64_t i = 0; i < keys; ++i) scores[i] = seen[i] ? scores[i] : none;
  for (int64_t i = keys; i < padded; ++i) scores[i] = none;
  Floats tops[2] = {load(scores), load(scores + LANES)};
  for (int64_t i = COLUMNS; i < padded; i += COLUMNS)
    for (int h = 0; h < 2; ++h) tops[h] = largest(load(scores + i + h * LANES), tops[h]);
  const Floats top = largest(tops[0], tops[1]);
  float most = top[0];
  for (int i = 1; i < LANES; ++i) most = top[i] > most ? top[i] : most;
  if (most == none) {  // as the reference: a row that sees nothing averages all values
    std::memset(scores, 0, keys * sizeof(float));
    most = 0.0f;
  }
  factor *= 1.44269504f;
  const Floats start = all(-most * factor);
  const auto weight = [&](const float* from) {  // 2^(14 + (score - most) factor), its integer in the low bits
    constexpr float MAGIC = 12582912.0f, EXPONENT = MAGIC + 127.0f + 14.0f;
    const Floats x = largest(all(-126.0f), load(from) * factor + start);
    const Floats shifted = x + EXPONENT, r = x - (shifted - EXPONENT);
    Floats p = r * 9.5828532e-3f + 5.5906425e-2f;  // 2^r to within 3e-6 of itself, a tenth of what is rounded away below
    p = p * r + 2.4024099e-1f;
    p = p * r + 6.9312419e-1f;
    p = p * r + 1.0f;
    const __m256i power = _mm256_slli_epi32((__m256i)shifted, 23);
    return p * (Floats)power + MAGIC;
  };
  Floats sum = {};
  int32_t* to = reinterpret_cast<int32_t*>(scores);
  for (int64_t block = 0; block < padded; block += DEPTH, ++alone) {
    __m256i pairs = _mm256_setzero_si256();
    for (int64_t i = block; i < padded && i < block + DEPTH; i += COLUMNS, to += LANES) {
      const Floats low = weight(scores + i), high = weight(scores + i + LANES);
      sum += (low - 12582912.0f) + (high - 12582912.0f);
      const __m256i units = _mm256_blend_epi16((__m256i)low, _mm256_slli_epi32((__m256i)high, 16), 0xaa);
      store16(to, units);
      pairs = _mm256_add_epi32(pairs, _mm256_madd_epi16(units, _mm256_srli_epi64(units, 32)));
    }
    *alone = sum_of(pairs);
  }
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += sum[i];
  return total;
}

// As attend(); right to 4e-3 of the largest value at worst, a tenth of that where numbers are random.
void attend16(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  const int64_t padded = round_up(a.keys, COLUMNS), width = round_up(a.size, COLUMNS);
  const int64_t units = width / 2, stride = score_stride(a.keys), blocks = (padded + DEPTH - 1) / DEPTH;
  int64_t limit = 16383;  // the sum of `size` products of such numbers stays below 2^31
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
  keys16(a, b, head, padded, units, limit, keys, key_alone, key_steps, queries);
  values16(a, b, head, padded, width, values, value_alone, value_steps);
  for (int64_t row = first; row < last; row += TOGETHER16) {
    const int rows = static_cast<int>(last - row < TOGETHER16 ? last - row : TOGETHER16);
    const int behind = (rows + ROWS16 - 1) / ROWS16 * ROWS16;  // the last tile's, with rows that are not there
    int32_t alone[TOGETHER16];
    float factors[TOGETHER16], totals[TOGETHER16];
    for (int64_t next = row + TOGETHER16; next < last && next < row + 2 * TOGETHER16; ++next) fetch(a.query(b, head, next), a.size);
    for (int r = 0; r < behind; ++r) {  // the last one stands for those that are not there
      const float* q = a.query(b, head, row + (r < rows ? r : rows - 1));
      factors[r] = a.scale * round16(q, a.size, 2 * units, limit, queries + r * units, alone + r);
    }
    for (int64_t i = 0; i < padded; i += COLUMNS)
      for (int r = 0; r < behind; r += ROWS16)
        tile16<true>(queries + r * units, units, keys + i * units, units, alone + r, key_alone + i, key_steps + i,
                     scores + r * stride + i, stride, false);
    for (int r = 0; r < behind; ++r) {
      const uint8_t* seen = r >= rows ? nullptr : a.seen(b, row + r);
      totals[r] = weights16(scores + r * stride, seen, a.keys, padded, factors[r], weight_alone + r * blocks);
    }
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t d = 0; d < width; d += COLUMNS)
        for (int r = 0; r < behind; r += ROWS16) {
          const int64_t i = block * DEPTH, there = padded - i < DEPTH ? padded - i : DEPTH;
          int32_t pairs[ROWS16];
          for (int s = 0; s < ROWS16; ++s) pairs[s] = weight_alone[(r + s) * blocks + block];
          tile16<false>(reinterpret_cast<const int32_t*>(scores) + r * stride + i / 2, stride,
                        values + (d * padded + i * COLUMNS) / 2, there / 2, pairs, value_alone + block * width + d, nullptr,
                        out + r * width + d, width, block > 0);
        }
    for (int r = 0; r < rows; ++r) {
      const float inverse = 1.0f / totals[r];
      float* y = a.result(b, head, row + r);
      for (int64_t d = 0; d < a.size; ++d) y[d] = out[r * width + d] * value_steps[d] * inverse;
    }
  }
}

}  // namespace
}  // namespace lowbit
