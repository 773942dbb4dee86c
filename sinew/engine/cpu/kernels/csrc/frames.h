// A frame's bilinear resize, to the bit what sinew/steps/image/bilinear.py computes with numpy: columns first, then rows, each
// product and sum rounded on its own.
#pragma once
#include <utility>

#include "kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lowbit {
namespace {

#if defined(__AVX2__)
// 2^24 * (u / 255), rounded as a division rounds it, of u three times in a row: those 24 bits are (2^24 - 1) / 255 of u, and lack
// half a unit in the last place to one, unless u is 0.
inline __m256 over_255(__m256i bytes) {
  const __m256i least = _mm256_castps_si256(_mm256_cvtepi32_ps(bytes));
  return _mm256_castsi256_ps(_mm256_sub_epi32(least, _mm256_cmpgt_epi32(bytes, _mm256_setzero_si256())));
}

// The bytes that four values are made of.
template <bool NEAR>
inline __m128i bytes_of(const uint8_t* line, const int32_t* starts) {
  const auto at = [&](int i) { return reinterpret_cast<const __m128i*>(line + starts[i]); };
  return NEAR ? _mm_loadu_si128(at(0)) : _mm_unpacklo_epi64(_mm_loadl_epi64(at(0)), _mm_loadl_epi64(at(1)));
}

// Eight values at a time: a shuffle spreads bytes over lanes of 32 bits, three times each. Not sixteen with AVX-512, which is no faster on
// a Zen 4, where what a line costs is the number of operations, not their width.
template <bool NEAR>
inline void across_in_eights(const Picture& p, const uint8_t* line, float* to) {
  for (int64_t i = 0; i < p.values; i += 8) {
    const int32_t* starts = p.starts + i / 2;
    const __m256i bytes = _mm256_setr_m128i(bytes_of<NEAR>(line, starts), bytes_of<NEAR>(line, starts + 2));
    const auto weighed = [&](int64_t of) {
      const __m256i pick = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.picks + 4 * of));
      return _mm256_mul_ps(over_255(_mm256_shuffle_epi8(bytes, pick)), _mm256_loadu_ps(p.column_weights + of));
    };
    _mm256_storeu_ps(to + i, _mm256_add_ps(weighed(i), weighed(p.values + i)));
  }
}
#endif

// A line of bytes -> float [width][3], and some behind it: each value from its left and its right neighbour.
inline void across(const Picture& p, const uint8_t* line, float* to) {
#if defined(__AVX2__)
  if (p.reach == 16) return across_in_eights<true>(p, line, to);
  if (p.reach == 8) return across_in_eights<false>(p, line, to);
#endif
  for (int64_t i = 0; i < p.values; ++i) {
    const auto weighed = [&](int64_t of) {
      const uint8_t pick = p.picks[4 * of];
      return line[p.starts[i / 4 * 2 + pick / 8] + pick % 8] / 255.0f * (p.column_weights[of] * (1 << 24));
    };
    to[i] = weighed(i) + weighed(p.values + i);
  }
}

// See Picture. `memory`: three lines of `values`.
void resize(const Picture& p, float* memory) {
  float *upper = memory, *lower = memory + p.values, *__restrict mixed = memory + 2 * p.values;
  int32_t above = -1, below = -1;  // which lines the two hold
  for (int64_t y = 0; y < p.height; ++y) {
    if (p.first[y] == below) {
      std::swap(upper, lower);
      std::swap(above, below);
    }
    if (p.first[y] != above) across(p, p.frame + p.first[y] * p.row_bytes, upper), above = p.first[y];
    if (p.second[y] != below && p.second[y] != above)
      across(p, p.frame + p.second[y] * p.row_bytes, lower), below = p.second[y];
    const float *a = upper, *b = p.second[y] == above ? upper : lower;
    const float weight = p.row_weights[y], other = 1.0f - weight;
    for (int64_t i = 0; i < p.values; ++i) {
      const float one = a[i] * other, two = b[i] * weight;
      mixed[i] = one + two;
    }
    float *__restrict red = p.out + y * p.row, *__restrict green = red + p.plane, *__restrict blue = green + p.plane;
    for (int64_t i = 0; i < p.width; ++i) {
      red[i] = mixed[3 * i];
      green[i] = mixed[3 * i + 1];
      blue[i] = mixed[3 * i + 2];
    }
  }
}

}  // namespace
}  // namespace lowbit
