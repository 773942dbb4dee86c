// Resizes of frames that equal numpy in sinew/steps/image/ in every bit. Each product and sum of floats is rounded
// separately.
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lowbit {
namespace {

constexpr float OVER_255 = static_cast<float>(1 / 255.0);

#if defined(__AVX2__)
// Return 2^24 * (u / 255) as floats, rounded like a division. Each lane of `bytes` has the byte u three times. These 24
// bits are u * (2^24 - 1) / 255, which is half a unit to one unit in the last place less than the result, unless u is
// 0.
inline __m256 over_255(__m256i bytes) {
  const __m256i least = _mm256_castps_si256(_mm256_cvtepi32_ps(bytes));
  return _mm256_castsi256_ps(_mm256_sub_epi32(least, _mm256_cmpgt_epi32(bytes, _mm256_setzero_si256())));
}

// Load the bytes that four values need.
template <bool NEAR>
inline __m128i bytes_of(const uint8_t* line, const int32_t* starts) {
  const auto at = [&](int i) { return reinterpret_cast<const __m128i*>(line + starts[i]); };
  return NEAR ? _mm_loadu_si128(at(0)) : _mm_unpacklo_epi64(_mm_loadl_epi64(at(0)), _mm_loadl_epi64(at(1)));
}

// Compute eight values at a time. A shuffle spreads bytes over lanes of 32 bits, three times each. Sixteen values with
// AVX-512 are not faster on a Zen 4, where the number of operations decides the time of a line.
template <bool NEAR, Mixed MIXED, class To>
// The argument p is a copy, so that the compiler knows that the stores do not change it.
inline void across_in_eights(Picture p, const uint8_t* line, To* to) {
  for (int64_t i = 0; i < p.values; i += 8) {
    const int32_t* starts = p.starts + i / 2;
    const __m256i bytes = _mm256_setr_m128i(bytes_of<NEAR>(line, starts), bytes_of<NEAR>(line, starts + 2));
    const auto picked = [&](int64_t of) {
      return _mm256_shuffle_epi8(bytes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.picks + 4 * of)));
    };
    if constexpr (MIXED == CROP) {
      const auto unit = [&](int64_t of) {
        const __m256i value = _mm256_and_si256(picked(of), _mm256_set1_epi32(255));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(value), _mm256_set1_ps(OVER_255));
      };
      const __m256 left = unit(i), step = _mm256_sub_ps(unit(p.values + i), left);
      const __m256 weights = _mm256_loadu_ps(static_cast<const float*>(p.column_weights) + i);
      _mm256_storeu_ps(to + i, _mm256_add_ps(left, _mm256_mul_ps(step, weights)));
    } else if constexpr (MIXED == PLANES) {
      const auto weighed = [&](int64_t of) {
        return _mm256_mul_ps(over_255(picked(of)), _mm256_loadu_ps(static_cast<const float*>(p.column_weights) + of));
      };
      _mm256_storeu_ps(to + i, _mm256_add_ps(weighed(i), weighed(p.values + i)));
    } else {
      const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const int32_t*>(p.column_weights) + i));
      const __m256i both = _mm256_blend_epi16(picked(i), picked(p.values + i), 0xaa);
      const __m256i pair = _mm256_and_si256(both, _mm256_set1_epi16(255));
      const __m256i sum = _mm256_srai_epi32(_mm256_madd_epi16(pair, weights), 4);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_packs_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
    }
  }
}
#endif

// Convert a line of bytes to float or int16_t [width][3], with some values after its end. Each value mixes its left and
// its right neighbour.
template <Mixed MIXED, class To>
inline void across(const Picture& p, const uint8_t* line, To* to) {
#if defined(__AVX2__)
  if (p.reach == 16) return across_in_eights<true, MIXED>(p, line, to);
  if (p.reach == 8) return across_in_eights<false, MIXED>(p, line, to);
#endif
  for (int64_t i = 0; i < p.values; ++i) {
    const auto picked = [&](int64_t of) {
      const uint8_t pick = p.picks[4 * of];
      return line[p.starts[i / 4 * 2 + pick / 8] + pick % 8];
    };
    if constexpr (MIXED == CROP) {
      const float left = picked(i) * OVER_255, step = picked(p.values + i) * OVER_255 - left;
      const float more = step * static_cast<const float*>(p.column_weights)[i];
      to[i] = left + more;
    } else if constexpr (MIXED == PLANES) {
      const auto weighed = [&](int64_t of) {
        return picked(of) / 255.0f * (static_cast<const float*>(p.column_weights)[of] * (1 << 24));
      };
      to[i] = weighed(i) + weighed(p.values + i);
    } else {
      const int32_t weights = static_cast<const int32_t*>(p.column_weights)[i];
      to[i] = static_cast<To>((picked(i) * (weights & 0xffff) + picked(p.values + i) * (weights >> 16)) >> 4);
    }
  }
}

// Compute one row of planes or bytes from two mixed lines.
template <Mixed MIXED>
inline void down(const Picture& p, int64_t y, const float* above, const float* below, float* __restrict mixed) {
  const float weight = static_cast<const float*>(p.row_weights)[y], other = 1.0f - weight;
  if constexpr (MIXED == CROP) {
    const int64_t count = 3 * p.width;
    uint8_t* __restrict to = static_cast<uint8_t*>(p.out) + y * count;
    for (int64_t i = 0; i < count; ++i) {
      const float more = (below[i] - above[i]) * weight, value = above[i] + more;
      const int whole = static_cast<int>(value * 255.5f);  // cut before the clamp, because products keep the order
      to[i] = static_cast<uint8_t>(whole < 0 ? 0 : whole > 255 ? 255 : whole);
    }
    return;
  }
  for (int64_t i = 0; i < p.values; ++i) {
    const float one = above[i] * other, two = below[i] * weight;
    mixed[i] = one + two;
  }
  float *__restrict red = static_cast<float*>(p.out) + y * p.row, *__restrict green = red + p.plane, *__restrict blue = green + p.plane;
  for (int64_t i = 0; i < p.width; ++i) {
    red[i] = mixed[3 * i];
    green[i] = mixed[3 * i + 1];
    blue[i] = mixed[3 * i + 2];
  }
}
template <Mixed>
inline void down(const Picture& p, int64_t y, const int16_t* above, const int16_t* below, int16_t*) {
  const int32_t* weights = static_cast<const int32_t*>(p.row_weights);
  const int16_t one = static_cast<int16_t>(weights[y]), two = static_cast<int16_t>(weights[p.height + y]);
  const int64_t count = 3 * p.width;
  uint8_t* __restrict to = static_cast<uint8_t*>(p.out) + y * count;
  for (int64_t i = 0; i < count; ++i) {
    const int16_t upper = static_cast<int16_t>((above[i] * one) >> 16), lower = static_cast<int16_t>((below[i] * two) >> 16);
    to[i] = static_cast<uint8_t>(static_cast<uint16_t>(upper + lower + 2) >> 2);
  }
}

// Resize columns first, then rows. `memory` has room for three lines of `values`.
template <Mixed MIXED, class Value>
void resize_as(const Picture& p, Value* memory) {
  Value *upper = memory, *lower = memory + p.values, *mixed = memory + 2 * p.values;
  int32_t above = -1, below = -1;  // indices of the lines in upper and lower
  for (int64_t y = 0; y < p.height; ++y) {
    if (p.first[y] == below) {
      std::swap(upper, lower);
      std::swap(above, below);
    }
    if (p.first[y] != above) across<MIXED>(p, p.frame + p.first[y] * p.row_bytes, upper), above = p.first[y];
    if (p.second[y] != below && p.second[y] != above)
      across<MIXED>(p, p.frame + p.second[y] * p.row_bytes, lower), below = p.second[y];
    down<MIXED>(p, y, upper, p.second[y] == above ? upper : lower, mixed);
  }
}

// Compute a bilinear resize (see Picture).
void resize(const Picture& p, void* memory) {
  if (p.mixed == OPENCV) return resize_as<OPENCV>(p, static_cast<int16_t*>(memory));
  p.mixed == CROP ? resize_as<CROP>(p, static_cast<float*>(memory)) : resize_as<PLANES>(p, static_cast<float*>(memory));
}

// TOGETHER values fill WORDS vectors of 32-bit lanes, with the width of the instruction set.
#if defined(__AVX512F__)
constexpr int LANE_BYTES = 64;
#elif defined(__AVX2__)
constexpr int LANE_BYTES = 32;
#else
constexpr int LANE_BYTES = 16;
#endif
constexpr int WORDS = 4 * TOGETHER / LANE_BYTES, LANES_OF_WORD = LANE_BYTES / 4;
typedef int32_t Ints __attribute__((vector_size(LANE_BYTES)));
typedef float Reals __attribute__((vector_size(LANE_BYTES)));
typedef uint8_t Octets __attribute__((vector_size(TOGETHER)));
typedef float Fours __attribute__((vector_size(16)));

// Interleave the values of two vectors: first their lower halves, then their upper halves.
#if defined(__clang__)
#define LOWBIT_ZIP(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LOWBIT_ZIP(a, b, ...) __builtin_shuffle(a, b, (Mask){__VA_ARGS__})
#endif
inline void zip(Octets a, Octets b, Octets& low, Octets& high) {
  typedef Octets Mask;
  low = LOWBIT_ZIP(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = LOWBIT_ZIP(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline void zip_pairs(Octets a, Octets (&zipped)[2]) {  // pairs of bytes, interleaved with pairs of zeros
  typedef Octets Mask;
  zipped[0] = LOWBIT_ZIP(a, Octets{}, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
  zipped[1] = LOWBIT_ZIP(a, Octets{}, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
}
inline void zip(Fours a, Fours b, Fours& low, Fours& high) {
  typedef int32_t Mask __attribute__((vector_size(16)));
  low = LOWBIT_ZIP(a, b, 0, 4, 1, 5);
  high = LOWBIT_ZIP(a, b, 2, 6, 3, 7);
}

template <class V, class T>
inline V loaded(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Transpose a square of values. Each round moves the highest bit of a value's position to the low end. The number of
// rounds is log2(ROUNDS).
template <class V, int SIDE, int ROUNDS = SIDE>
inline void turn(V (&square)[SIDE]) {
#pragma GCC unroll 4
  for (int round = 1; round < ROUNDS; round *= 2) {
    V turned[SIDE];
#pragma GCC unroll 8
    for (int i = 0; i < SIDE / 2; ++i) zip(square[i], square[i + SIDE / 2], turned[2 * i], turned[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; ++i) square[i] = turned[i];
  }
}

// Transpose TOGETHER rows of `count` values to [count][TOGETHER], or back. Rows after the first `there` rows are not
// written.
template <bool BACK, class V, class T>
inline void exchange(T* const (&rows)[TOGETHER], int64_t count, int there, T* columns) {
  constexpr int SIDE = sizeof(V) / sizeof(T);
  for (int64_t at = 0; at < count && count < SIDE; ++at)
    for (int r = 0; r < (BACK ? there : TOGETHER); ++r)
      BACK ? rows[r][at] = columns[at * TOGETHER + r] : columns[at * TOGETHER + r] = rows[r][at];
  for (int64_t begin = 0; begin < count && count >= SIDE; begin += SIDE) {
    const int64_t at = begin + SIDE < count ? begin : count - SIDE;
    for (int r = 0; r < TOGETHER; r += SIDE) {
      V square[SIDE];
      const auto column = [&](int i) { return columns + (at + i) * TOGETHER + r; };
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; ++i) square[i] = loaded<V>(BACK ? column(i) : rows[r + i] + at);
      turn(square);
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; ++i)
        if (!BACK || r + i < there) std::memcpy(BACK ? rows[r + i] + at : column(i), &square[i], sizeof(V));
    }
  }
}

// Return the `part`-th vector of TOGETHER values, converted to 32-bit lanes.
inline Ints widened(const uint8_t* from, int part, Ints) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * part)));
#else
  Octets halves[2], quarters[2];
  zip(loaded<Octets>(from), Octets{}, halves[0], halves[1]);
  zip_pairs(halves[part / 2], quarters);
  return (Ints)quarters[part % 2];
#endif
}
inline Reals widened(const uint8_t* from, int part, Reals) {
  return __builtin_convertvector(widened(from, part, Ints{}), Reals);
}
inline Reals widened(const float* from, int part, Reals) { return loaded<Reals>(from + part * LANES_OF_WORD); }

inline void finish_sums(const Ints (&sums)[WORDS], int bits, uint8_t* to) {
#if defined(__AVX512F__)
  const __m512i whole = _mm512_max_epi32((__m512i)(sums[0] >> bits), _mm512_setzero_si512());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(whole));
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packs_epi32((__m256i)(sums[0] >> bits), (__m256i)(sums[1] >> bits));
  // The pack instruction works on each half of 128 bits separately.
  const __m256i whole = _mm256_permute4x64_epi64(halves, 0xd8);
  const __m128i low = _mm256_castsi256_si128(whole), high = _mm256_extracti128_si256(whole, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(low, high));
#else
  int32_t whole[TOGETHER];
  std::memcpy(whole, sums, sizeof whole);
  for (int i = 0; i < TOGETHER; ++i) {
    const int32_t value = whole[i] >> bits;
    to[i] = static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
  }
#endif
}
inline void finish_sums(const Reals (&sums)[WORDS], int, float* to) { std::memcpy(to, sums, sizeof sums); }

// Compute the weighted sums of GROUPS * TOGETHER values. The taps of a value are `step` apart.
template <class V, int GROUPS, class From, class To, class Weight>
inline void weigh(const From* from, int64_t step, const Weight* weights, const Resampling& r, To* to) {
  const int bits = static_cast<int>(r.bits);
  V sums[GROUPS][WORDS];
#pragma GCC unroll 12
  for (int i = 0; i < GROUPS * WORDS; ++i) sums[i / WORDS][i % WORDS] = V{} + static_cast<Weight>(bits ? 1 << (bits - 1) : 0);
  for (int64_t tap = 0; tap < r.taps; ++tap, from += step)
#pragma GCC unroll 12
    for (int i = 0; i < GROUPS * WORDS; ++i)
      sums[i / WORDS][i % WORDS] += widened(from + i / WORDS * TOGETHER, i % WORDS, V{}) * weights[tap];
#pragma GCC unroll 3
  for (int g = 0; g < GROUPS; ++g) finish_sums(sums[g], bits, to + g * TOGETHER);
}

template <class V, class From, class To, class Weight>
void resample_as(const Resampling& r, char* memory) {
  typedef typename std::conditional<sizeof(From) == 1, Octets, Fours>::type FromSquare;
  typedef typename std::conditional<sizeof(To) == 1, Octets, Fours>::type ToSquare;
  const Weight* weights = static_cast<const Weight*>(r.weights);
  To* const to = static_cast<To*>(r.to);
  const auto row = [&](int64_t y) {
    return reinterpret_cast<From*>(const_cast<char*>(static_cast<const char*>(r.from) + y * r.row_bytes));
  };
  const int64_t wide = 3 * r.width;
  From* const turned = reinterpret_cast<From*>(memory);
  if (r.axis == 0 && wide < TOGETHER) {
    std::memset(turned, 0, r.height * TOGETHER * sizeof(From));
    for (int64_t y = 0; y < r.height; ++y) std::memcpy(turned + y * TOGETHER, row(y), wide * sizeof(From));
    for (int64_t y = 0; y < r.target; ++y) {
      To line[TOGETHER];
      weigh<V, 1>(turned + r.first[y] * TOGETHER, TOGETHER, weights + y * r.taps, r, line);
      std::memcpy(to + y * wide, line, wide * sizeof(To));
    }
    return;
  }
  const int64_t step = r.row_bytes / static_cast<int64_t>(sizeof(From));
  for (int64_t y = 0; r.axis == 0 && y < r.target; ++y) {
    const auto sums_at = [&](auto vectors, int64_t at) {
      weigh<V, decltype(vectors)::value>(row(r.first[y]) + at, step, weights + y * r.taps, r, to + y * wide + at);
    };
    int64_t at = 0;
    for (; at + 3 * TOGETHER <= wide; at += 3 * TOGETHER) sums_at(std::integral_constant<int, 3>(), at);
    // If a vector would exceed the line, compute the last values again.
    for (; at < wide; at += TOGETHER)
      sums_at(std::integral_constant<int, 1>(), at + TOGETHER < wide ? at : wide - TOGETHER);
  }
  if (r.axis == 0) return;
  To* const made = reinterpret_cast<To*>(turned + wide * TOGETHER);
  for (int64_t y = 0; y < r.height; y += TOGETHER) {
    const int there = static_cast<int>(r.height - y < TOGETHER ? r.height - y : TOGETHER);
    From* rows[TOGETHER];
    To* out[TOGETHER];
    for (int i = 0; i < TOGETHER; ++i) {
      rows[i] = row(y + (i < there ? i : 0));
      out[i] = to + (y + (i < there ? i : 0)) * 3 * r.target;
    }
    exchange<false, FromSquare>(rows, wide, there, turned);
    for (int64_t x = 0; x < r.target; ++x)
      weigh<V, 3>(turned + r.first[x] * 3 * TOGETHER, 3 * TOGETHER, weights + x * r.taps, r, made + x * 3 * TOGETHER);
    exchange<true, ToSquare>(out, 3 * r.target, there, made);
  }
}

// Compute one pass of a resize (see Resampling).
void resample(const Resampling& r, char* memory) {
  if (r.bits) return resample_as<Ints, uint8_t, uint8_t, int32_t>(r, memory);
  if (r.floats) return resample_as<Reals, float, float, float>(r, memory);
  resample_as<Reals, uint8_t, float, float>(r, memory);
}

}  // namespace
}  // namespace lowbit
