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
// u / 255, rounded as a division rounds it: u * 65793 has 24 bits and is (2^24 - 1) / 255 of u, so its 2^24th part lacks half
// a unit in the last place to one, unless u is 0.
inline __m256 over_255(__m256i bytes) {
  const __m256 least = _mm256_mul_ps(_mm256_cvtepi32_ps(bytes), _mm256_set1_ps(65793.0f / 16777216.0f));
  const __m256i some = _mm256_cmpgt_epi32(bytes, _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(least), some));
}
#endif
#if defined(__AVX512F__)
inline __m512 over_255(__m512i bytes) {
  const __m512i least = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(bytes), _mm512_set1_ps(65793.0f / 16777216.0f)));
  return _mm512_castsi512_ps(_mm512_mask_add_epi32(least, _mm512_test_epi32_mask(bytes, bytes), least, _mm512_set1_epi32(1)));
}
#endif

// A line of bytes -> float [width][3], and some behind it: each pixel from its left and its right neighbour.
inline void across(const Picture& p, const uint8_t* line, float* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i behind = _mm512_setr_epi32(3, 4, 5, 3, 3, 3, 3, 3, 11, 12, 13, 3, 3, 3, 3, 3);
  const __m512i together = _mm512_setr_epi32(0, 1, 2, 8, 9, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  for (; i + 2 <= p.whole; i += 2) {
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line + p.left[i]));
    const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line + p.left[i + 1]));
    const __m512 values = over_255(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(first, second)));
    const __m512 parts = _mm512_mul_ps(values, _mm512_loadu_ps(p.column_weights + 8 * i));
    const __m512 sums = _mm512_add_ps(parts, _mm512_permutexvar_ps(behind, parts));
    _mm256_storeu_ps(to + 3 * i, _mm512_castps512_ps256(_mm512_permutexvar_ps(together, sums)));
  }
#endif
#if defined(__AVX2__)
  const __m256i next = _mm256_setr_epi32(3, 4, 5, 3, 3, 3, 3, 3);
  for (; i < p.whole; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line + p.left[i]));
    const __m256 parts = _mm256_mul_ps(over_255(_mm256_cvtepu8_epi32(bytes)), _mm256_loadu_ps(p.column_weights + 8 * i));
    const __m256 sums = _mm256_add_ps(parts, _mm256_permutevar8x32_ps(parts, next));
    _mm_storeu_ps(to + 3 * i, _mm256_castps256_ps128(sums));
  }
#endif
  for (; i < p.width; ++i)
    for (int c = 0; c < 3; ++c) {
      const float left = line[p.left[i] + c] / 255.0f * p.column_weights[8 * i];
      const float right = line[p.right[i] + c] / 255.0f * p.column_weights[8 * i + 3];
      to[3 * i + c] = left + right;
    }
}

// See Picture. `memory`: three lines of 3 * width + 8.
void resize(const Picture& p, float* memory) {
  const int64_t wide = 3 * p.width, line = wide + 8;
  float *upper = memory, *lower = memory + line, *__restrict mixed = memory + 2 * line;
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
    for (int64_t i = 0; i < wide; ++i) {
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
