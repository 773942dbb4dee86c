// Operations between products in float32: attention, activations and norms. The code consists of plain loops over
// vectors of the instruction set's width. Each file that includes this header compiles its own copy (the internal
// linkage is intended). The code may use fused multiply-adds, because its results are only compared within the bounds
// of docs/low-bit.md.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"
#if LOWBIT_VECTOR == 32
#include <immintrin.h>
#endif

namespace lowbit {
namespace {

// LOWBIT_VECTOR is the size of a vector in bytes. LOWBIT_ROWS is the number of rows of a tile of 16 columns.
constexpr int LANES = LOWBIT_VECTOR / 4, COLUMNS = CHANNELS, VECTORS = COLUMNS / LANES, TILE = LOWBIT_ROWS;
constexpr int TILES = 4, DEPTH = 128;  // a block of DEPTH values has 8 KiB, next to 12 KiB of scores
typedef float Floats __attribute__((vector_size(LOWBIT_VECTOR)));
typedef uint32_t Bits __attribute__((vector_size(LOWBIT_VECTOR)));

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
inline Floats all(float value) { return value - Floats{}; }
// Return the larger value, or b if a or b is NaN.
#if LOWBIT_VECTOR == 32
inline Floats largest(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
#else
inline Floats largest(Floats a, Floats b) { return a > b ? a : b; }
#endif

// Return e^x with a relative error of at most 3e-7 for x in [-87, 88]. Values of x outside this range are clamped. NaN
// stays NaN. The method is x = n ln(2) + r with |r| <= ln(2) / 2, and the polynomial 1 + r + r^2 p(r) with the least
// relative error on this interval, 1.1e-7.
inline Floats exponential(Floats x) {
  x = largest(all(-87.0f), x);
  x = x > 88.0f ? all(88.0f) : x;
  const Floats shifted = x * 1.44269504f + (12582912.0f + 127.0f);  // with 1.5 * 2^23, n + 127 is in the low bits
  const Floats n = shifted - (12582912.0f + 127.0f);
  // The method of Cody and Waite, in which the first product is exact.
  const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = r * 8.3125010e-3f + 4.1890331e-2f;
  p = p * r + 1.6667116e-1f;
  p = p * r + 4.9999231e-1f;
  p = p * (r * r) + r + 1.0f;
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = bits << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// Compute GELU in its tanh form for `count` values in place, as x * sigmoid(2 u) (sinew/engine/plan/gelu.py).
void gelu(float* x, int64_t count) {
  const auto one = [](Floats v) {
    const Floats u = v * (v * v * 0.0713548162726f + 1.59576912161f);
    return v / (1.0f + exponential(-u));
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(x + i, one(load(x + i)));
  if (i < count) {
    float last[LANES] = {};
    std::memcpy(last, x + i, (count - i) * sizeof(float));
    store(last, one(load(last)));
    std::memcpy(x + i, last, (count - i) * sizeof(float));
  }
}

// Replace `count` values of gate by gate * sigmoid(gate) * up.
void silu_times(float* gate, const float* up, int64_t count) {
  const auto one = [](Floats g, Floats u) { return g / (1.0f + exponential(-g)) * u; };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(gate + i, one(load(gate + i), load(up + i)));
  if (i < count) {
    float last[2][LANES] = {};
    std::memcpy(last[0], gate + i, (count - i) * sizeof(float));
    std::memcpy(last[1], up + i, (count - i) * sizeof(float));
    store(last[0], one(load(last[0]), load(last[1])));
    std::memcpy(gate + i, last[0], (count - i) * sizeof(float));
  }
}

inline float row_sum(const float* x, int64_t k, float less, bool squares) {
  Floats sums[4] = {};  // several sums, because each addition waits for the previous addition to the same sum
  const auto term = [&](Floats v) {
    v = v - less;
    return squares ? v * v : v;
  };
  int64_t i = 0;
  for (; i + 4 * LANES <= k; i += 4 * LANES)
    for (int s = 0; s < 4; ++s) sums[s] += term(load(x + i + s * LANES));
  for (; i + LANES <= k; i += LANES) sums[0] += term(load(x + i));
  const Floats all_of = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = 0;
  for (int s = 0; s < LANES; ++s) total += all_of[s];
  for (; i < k; ++i) total += squares ? (x[i] - less) * (x[i] - less) : x[i] - less;
  return total;
}

// Compute a norm (see Norm). `out` must not be x.
void norm(const float* x, int64_t k, const Norm& of, float* __restrict out) {
  const float mean = of.centred ? row_sum(x, k, 0.0f, false) / k : 0.0f;
  const float scale = 1.0f / __builtin_sqrtf(row_sum(x, k, mean, true) / k + of.eps);
  for (int64_t i = 0; i < k; ++i) out[i] = (x[i] - mean) * scale;
  if (of.weight != nullptr)
    for (int64_t i = 0; i < k; ++i) out[i] *= of.weight[i];
  if (of.bias != nullptr)
    for (int64_t i = 0; i < k; ++i) out[i] += of.bias[i];
}

// Compute [R][COLUMNS] sums of a[r * stride + i] * b[i][COLUMNS] over i < n, and add them to `out` if `more`.
template <int R>
inline void tile(const float* a, int64_t stride, const float* b, int64_t n, float* out, int64_t out_stride, bool more) {
  Floats sums[R][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = more ? load(out + r * out_stride + v * LANES) : Floats{};
  for (int64_t i = 0; i < n; ++i, b += COLUMNS) {
    Floats columns[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) columns[v] = load(b + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats one = all(a[r * stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sums[r][v] += one * columns[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS; ++v) store(out + r * out_stride + v * LANES, sums[r][v]);
}

// Convert the scores of one query to attention weights, and return the sum of the weights. Positions after the last key
// get the weight 0.
inline float weights(float* scores, const uint8_t* seen, int64_t keys, int64_t padded) {
  // A finite number, so that a row without visible keys averages all values as in the reference.
  constexpr float LEAST = -3.40282347e38f;
  if (seen != nullptr)
    for (int64_t i = 0; i < keys; ++i) scores[i] = seen[i] ? scores[i] : LEAST;
  for (int64_t i = keys; i < padded; ++i) scores[i] = LEAST;
  Floats tops[VECTORS];  // several maxima, because each comparison waits for the previous comparison of the same maximum
  for (int v = 0; v < VECTORS; ++v) tops[v] = load(scores + v * LANES);
  for (int64_t i = COLUMNS; i < padded; i += COLUMNS)
    for (int v = 0; v < VECTORS; ++v) tops[v] = largest(load(scores + i + v * LANES), tops[v]);
  Floats top = tops[0];
  for (int v = 1; v < VECTORS; ++v) top = largest(tops[v], top);
  float most = top[0];
  for (int i = 1; i < LANES; ++i) most = top[i] > most ? top[i] : most;
  Floats sum = {};
  for (int64_t i = 0; i < padded; i += LANES) {
    const Floats weight = exponential(load(scores + i) - most);
    store(scores + i, weight);
    sum += weight;
  }
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += sum[i];
  for (int64_t i = keys; i < padded; ++i) {
    total -= scores[i];
    scores[i] = 0;
  }
  return total;
}

// Compute the attention of one key head of batch b: rows `first` to `last`, over all keys. `memory` has attend_bytes().
// TILES tiles of queries are computed together, so that they read keys and values from the first-level cache.
void attend(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  const int64_t padded = round_up(a.keys, COLUMNS), width = round_up(a.size, COLUMNS);
  const int64_t stride = row_stride(a.keys);
  float* keys = reinterpret_cast<float*>(memory);          // [padded / COLUMNS][size][COLUMNS]
  float* values = keys + padded * width;                   // [width / COLUMNS][padded][COLUMNS]
  float* scores = values + padded * width;                 // [TILES * TILE][stride]
  float* queries = scores + TILES * TILE * stride;         // [TILES * TILE][size]
  float* out = queries + TILES * TILE * width;             // [TILES * TILE][width]
  std::memset(memory, 0, 2 * padded * width * sizeof(float));
  for (int64_t i = 0; i < a.keys; ++i) {
    float* to = keys + i / COLUMNS * a.size * COLUMNS + i % COLUMNS;
    const float *k = a.key(b, head, i), *v = a.value(b, head, i);
    for (int64_t d = 0; d < a.size; ++d) to[d * COLUMNS] = k[d];
    for (int64_t d = 0; d < a.size; d += COLUMNS) {
      const int64_t there = a.size - d < COLUMNS ? a.size - d : COLUMNS;
      std::memcpy(values + (d * padded / COLUMNS + i) * COLUMNS, v + d, there * sizeof(float));
    }
  }
  for (int64_t row = first; row < last; row += TILES * TILE) {
    const int rows = static_cast<int>(last - row < TILES * TILE ? last - row : TILES * TILE);
    const int behind = (rows + TILE - 1) / TILE * TILE;  // the number of rows including the unused rows of the last tile
    for (int r = 0; r < behind; ++r) {
      const float* q = a.query(b, head, row + (r < rows ? r : 0));
      for (int64_t d = 0; d < a.size; ++d) queries[r * a.size + d] = r < rows ? q[d] * a.scale : 0.0f;
    }
    for (int64_t i = 0; i < padded; i += COLUMNS)
      for (int r = 0; r < behind; r += TILE)
        tile<TILE>(queries + r * a.size, a.size, keys + i * a.size, a.size, scores + r * stride + i, stride, false);
    float totals[TILES * TILE];
    for (int r = 0; r < behind; ++r) {
      const uint8_t* seen = r >= rows ? nullptr : a.seen(b, row + r);
      totals[r] = weights(scores + r * stride, seen, a.keys, padded);
    }
    for (int64_t i = 0; i < a.keys; i += DEPTH)
      for (int64_t d = 0; d < width; d += COLUMNS)
        for (int r = 0; r < behind; r += TILE)
          tile<TILE>(scores + r * stride + i, stride, values + d * padded + i * COLUMNS,
                     a.keys - i < DEPTH ? a.keys - i : DEPTH, out + r * width + d, width, i > 0);
    for (int r = 0; r < rows; ++r) {
      const float inverse = 1.0f / totals[r];
      float* y = a.result(b, head, row + r);
      for (int64_t d = 0; d < a.size; ++d) y[d] = out[r * width + d] * inverse;
    }
  }
}

const FloatKernels FLOATS = {TILES * TILE, TILE, attend, attend, gelu, silu_times, norm};

}  // namespace
}  // namespace lowbit
