// Attention with products of bfloat16, for instruction sets that multiply bfloat16 with tiles (x86_amx.cpp) or with bfmmla
// (arm_bf16.cpp).
//
// Queries times scale * log2(e), keys and values are rounded to bfloat16, and scores are sums in the order of the set's
// products (sinew/layers/stores/lowbit.py). An attention weight is 2^(score - largest score), computed by power() and rounded
// to bfloat16, half away from zero. The weights are added in 16 sums, one for each key modulo 16, and these sums as in
// reduced(). The results are sums in the order of the products, with the keys 0, 16, 1, 17, ... of each 32 keys, times the
// inverse of the sum of weights. The error is that of an attention in bfloat16 by PyTorch.
//
// LOWBIT_VECTOR is the size of a vector in bytes. Each file that includes this header compiles its own copy.
#pragma once
#include "rows.h"

namespace lowbit {
namespace {

constexpr int LANES = LOWBIT_VECTOR / 4, VECTORS = CHANNELS / LANES;
constexpr int PAIR = 2 * CHANNELS;  // keys of two panels
typedef float Floats __attribute__((vector_size(LOWBIT_VECTOR)));
typedef uint32_t Words __attribute__((vector_size(LOWBIT_VECTOR)));

template <class T>
inline T read(const void* from) {
  T made;
  std::memcpy(&made, from, sizeof made);
  return made;
}

// Compute 2^x for x at most 0, with a relative error of at most 1.1e-4. Results below 2^-120 are zeros, and NaN stays NaN.
inline Floats power(Floats x) {
  const Floats shifted = x + 12582912.0f;  // with 1.5 * 2^23, the nearest whole number is in the low bits
  const Floats part = x - (shifted - 12582912.0f);
  const Floats p = ((part * 0.0550090224f + 0.2422113121f) * part + 0.6932829618f) * part + 1.0f;
  const Floats whole = (Floats)(((Words)shifted << 23) + 0x3f800000);
  return x < -120.0f ? Floats{} : p * whole;
}

// Combine the values 8 apart, then those 4, 2 and 1 apart.
template <class Function>
inline float reduced(const Floats (&all)[VECTORS], const Function& function) {
  float values[CHANNELS];
  std::memcpy(values, &all, sizeof values);
  for (int apart = CHANNELS / 2; apart > 0; apart /= 2)
    for (int i = 0; i < apart; ++i) values[i] = function(values[i], values[i + apart]);
  return values[0];
}

// Replace the scores of one query by attention weights in bfloat16. Of each 32 keys, the products take them in the order 0,
// 16, 1, 17 and so on. Return the sum of the weights, or NaN if a score is NaN.
template <class Products>
inline float weights(const Products& products, int64_t row, const uint8_t* seen, int64_t keys, int64_t padded) {
  const float none = -__builtin_inff();
  const auto at = [&](int64_t i) { return products.scores(row, i / CHANNELS) + i % CHANNELS; };
  if (seen != nullptr)
    for (int64_t i = 0; i < keys; ++i) *at(i) = seen[i] ? *at(i) : none;
  for (int64_t i = keys; i < padded; ++i) *at(i) = none;
  Floats tops[2][VECTORS];  // several maxima, because each comparison waits for the one before
  for (int v = 0; v < VECTORS; ++v) tops[0][v] = tops[1][v] = none - Floats{};
  for (int64_t i = 0; i < padded; i += PAIR)
    for (int h = 0; h < 2; ++h)
      for (int v = 0; v < VECTORS; ++v) {
        const Floats score = read<Floats>(at(i + h * CHANNELS) + v * LANES);
        tops[h][v] = score > tops[h][v] ? score : tops[h][v];
      }
  for (int v = 0; v < VECTORS; ++v) tops[0][v] = tops[0][v] > tops[1][v] ? tops[0][v] : tops[1][v];
  float most = reduced(tops[0], [](float a, float b) { return a > b ? a : b; });
  if (most == none) {  // as in the reference, a row without visible keys averages all values
    for (int64_t i = 0; i < keys; ++i) *at(i) = *at(i) == none ? 0.0f : *at(i);
    most = 0.0f;
  }
  Floats sums[VECTORS] = {};
  for (int64_t i = 0; i < padded; i += PAIR) {
    Words halves[2][VECTORS];
    for (int h = 0; h < 2; ++h)  // the low 16 bits of a NaN are zero, because it comes from bfloat16, so it stays NaN
      for (int v = 0; v < VECTORS; ++v) {
        const Floats weight = power(read<Floats>(at(i + h * CHANNELS) + v * LANES) - most);
        halves[h][v] = ((Words)weight + 0x8000) & 0xffff0000;
        sums[v] += (Floats)halves[h][v];
      }
    for (int v = 0; v < VECTORS; ++v) products.weigh(row, i, v, halves[0][v] >> 16 | halves[1][v]);
  }
  return reduced(sums, [](float a, float b) { return a + b; });
}

// Compute FloatKernels::attend_rounded. `Products` has the products of one set for up to Products::ROWS queries at a time:
//
//   Products(padded, width, size, memory)  padded, width: `keys` and `size` after padding to whole panels
//   multiply_keys(lines, rows, keys)       compute the scores of queries in bfloat16 [rows][width]
//   scores(row, panel)                     the scores of a query for the 16 keys of a panel
//   weigh(row, i, v, words)                store vector v of the weights of the 32 keys from i on
//   multiply_values(rows, values)          compute the results
//   results(row, panel)                    16 values of a result
//
// `keys` is [padded / 16][width / 2][16][2], and `values` is [width / 16][padded / 2][16][2], in bfloat16.
template <class Products>
void attend_halves(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  const int64_t padded = round_up(a.keys, PAIR), width = round_up(a.size, PAIR);
  const auto take = [&](int64_t bytes) {
    char* at = memory;
    memory += bytes;
    return at;
  };
  char* keys = take(2 * padded * width);
  char* values = take(2 * padded * width);
  float* scaled = reinterpret_cast<float*>(take(width * sizeof(float)));
  int8_t* lines = reinterpret_cast<int8_t*>(take(2 * PAIR * width));  // rows in bfloat16, with zeros after `size`
  std::memset(lines, 0, 2 * PAIR * width);
  const auto line = [&](int64_t j, const float* from) {
    if (from != nullptr)
      Products::round(from, a.size, lines + 2 * j * width);
    else
      std::memset(lines + 2 * j * width, 0, 2 * a.size);
  };
  for (int64_t i = 0; i < padded; i += CHANNELS) {
    for (int64_t j = 0; j < CHANNELS; ++j) line(j, i + j < a.keys ? a.key(b, head, i + j) : nullptr);
    for (int64_t d = 0; d < width; d += PAIR)
      transpose(reinterpret_cast<int32_t*>(lines) + d / 2, width / 2, CHANNELS,
                reinterpret_cast<int32_t*>(keys + 2 * i * width) + d / 2 * CHANNELS);
  }
  for (int64_t i = 0; i < padded; i += PAIR) {
    for (int64_t j = 0; j < PAIR; ++j) line(j, i + j < a.keys ? a.value(b, head, i + j) : nullptr);
    const uint16_t* from = reinterpret_cast<uint16_t*>(lines);
    for (int64_t d = 0; d < width; d += CHANNELS)
      for (int64_t j = 0; j < CHANNELS; ++j) {
        const uint16_t *low = from + j * width + d, *high = low + CHANNELS * width;
        uint32_t pairs[CHANNELS];
        for (int n = 0; n < CHANNELS; ++n) pairs[n] = low[n] | static_cast<uint32_t>(high[n]) << 16;
        std::memcpy(values + 2 * d * padded + (i / 2 + j) * sizeof pairs, pairs, sizeof pairs);
      }
  }
  const float factor = a.scale * 1.44269504f;  // log2(e)
  Products products(padded, width, a.size, memory);
  for (int64_t row = first; row < last; row += Products::ROWS) {
    const int64_t rows = last - row < Products::ROWS ? last - row : Products::ROWS;
    for (int64_t r = 0; r < rows; ++r) {
      const float* q = a.query(b, head, row + r);
      for (int64_t d = 0; d < a.size; ++d) scaled[d] = q[d] * factor;
      line(r, scaled);
    }
    products.multiply_keys(lines, rows, keys);
    float totals[Products::ROWS];
    for (int64_t r = 0; r < rows; ++r) totals[r] = weights(products, r, a.seen(b, row + r), a.keys, padded);
    products.multiply_values(rows, values);
    for (int64_t r = 0; r < rows; ++r) {
      const float inverse = 1.0f / totals[r];
      float* y = a.result(b, head, row + r);
      for (int64_t d = 0; d < a.size; d += CHANNELS) {
        const float* from = products.results(r, d / CHANNELS);
        const int64_t there = a.size - d < CHANNELS ? a.size - d : CHANNELS;
        for (int64_t i = 0; i < there; ++i) y[d + i] = from[i] * inverse;
      }
    }
  }
}

}  // namespace
}  // namespace lowbit
