// What stands between the products, in float32: attention and GELU. Plain loops over vectors of the width that an
// instruction set has; each file that includes this compiles its own copy (internal linkage on purpose), with fused
// multiply-adds, for nothing here is promised to the bit. docs/low-bit.md states the bounds.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace lowbit {
namespace {

// LOWBIT_VECTOR: bytes of a vector. LOWBIT_ROWS: of a tile of 16 columns.
constexpr int LANES = LOWBIT_VECTOR / 4, COLUMNS = CHANNELS, VECTORS = COLUMNS / LANES, TILE = LOWBIT_ROWS;
typedef float Floats __attribute__((vector_size(LOWBIT_VECTOR)));
typedef uint32_t Bits __attribute__((vector_size(LOWBIT_VECTOR)));

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
inline Floats all(float value) { return value - Floats{}; }
inline Floats largest(Floats a, Floats b) { return a > b ? a : b; }

// e^x to within 2 units in the last place for x in [-87, 88]; beyond, as at that end. NaN stays NaN. Cody and Waite's
// reduction to |r| <= ln(2) / 2, then Cephes' polynomial.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the whole number is in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000u + 127u) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// GELU in its tanh form, as x * sigmoid(2 u) (sinew/engine/plan/gelu.py), of `count` values in place.
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

// gate * sigmoid(gate) * up, of `count` values, into gate.
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

// [R][COLUMNS] sums of a[r * stride + i] * b[i][COLUMNS] over i < n.
template <int R>
inline void tile(const float* a, int64_t stride, const float* b, int64_t n, float* out, int64_t out_stride) {
  Floats sums[R][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = Floats{};
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

// Scores of one query -> weights that add up to `return value`. Keys behind `keys` get none.
inline float weights(float* scores, const uint8_t* seen, int64_t keys, int64_t padded) {
  constexpr float LEAST = -3.40282347e38f;  // as the reference: a row that sees nothing averages all values
  if (seen != nullptr)
    for (int64_t i = 0; i < keys; ++i) scores[i] = seen[i] ? scores[i] : LEAST;
  for (int64_t i = keys; i < padded; ++i) scores[i] = LEAST;
  Floats top = load(scores);
  for (int64_t i = LANES; i < padded; i += LANES) top = largest(load(scores + i), top);
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

// One head of `a`: queries `first` to `last` of batch b over all keys. `memory`: attend_bytes().
void attend(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  const int64_t padded = round_up(a.keys, COLUMNS), width = round_up(a.size, COLUMNS), shared = a.heads / a.key_heads;
  float* keys = reinterpret_cast<float*>(memory);         // [padded / COLUMNS][size][COLUMNS]
  float* values = keys + padded * width;                  // [width / COLUMNS][padded][COLUMNS]
  float* scores = values + padded * width;                // [TILE][padded]
  float* queries = scores + TILE * padded;                // [TILE][size]
  float* out = queries + TILE * width;                    // [TILE][width]
  const float* k = a.k + b * a.k_batch + head / shared * a.size;
  const float* v = a.v + b * a.v_batch + head / shared * a.size;
  std::memset(memory, 0, 2 * padded * width * sizeof(float));
  for (int64_t i = 0; i < a.keys; ++i) {
    float* to = keys + i / COLUMNS * a.size * COLUMNS + i % COLUMNS;
    for (int64_t d = 0; d < a.size; ++d) to[d * COLUMNS] = k[i * a.k_row + d];
    for (int64_t d = 0; d < a.size; d += COLUMNS) {
      const int64_t there = a.size - d < COLUMNS ? a.size - d : COLUMNS;
      std::memcpy(values + (d * padded / COLUMNS + i) * COLUMNS, v + i * a.v_row + d, there * sizeof(float));
    }
  }
  for (int64_t row = first; row < last; row += TILE) {
    const int rows = static_cast<int>(last - row < TILE ? last - row : TILE);
    std::memset(queries, 0, TILE * a.size * sizeof(float));
    for (int r = 0; r < rows; ++r) {
      const float* q = a.q + b * a.q_batch + (row + r) * a.q_row + head * a.size;
      for (int64_t d = 0; d < a.size; ++d) queries[r * a.size + d] = q[d] * a.scale;
    }
    for (int64_t i = 0; i < padded; i += COLUMNS)
      tile<TILE>(queries, a.size, keys + i * a.size, a.size, scores + i, padded);
    float totals[TILE];
    for (int r = 0; r < TILE; ++r) {
      const uint8_t* seen = a.mask == nullptr || r >= rows ? nullptr : a.mask + (b * a.queries + row + r) * a.keys;
      totals[r] = weights(scores + r * padded, seen, a.keys, padded);
    }
    for (int64_t d = 0; d < width; d += COLUMNS)
      tile<TILE>(scores, padded, values + d * padded, a.keys, out + d, width);
    for (int r = 0; r < rows; ++r) {
      const float inverse = 1.0f / totals[r];
      float* y = a.out + ((b * a.queries + row + r) * a.heads + head) * a.size;
      for (int64_t d = 0; d < a.size; ++d) y[d] = out[r * width + d] * inverse;
    }
  }
}

const Between BETWEEN = {TILE, attend, gelu, silu_times};

}  // namespace
}  // namespace lowbit
