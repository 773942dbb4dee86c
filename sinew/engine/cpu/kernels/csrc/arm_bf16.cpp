// NEON with matrix products of bfloat16 (Neoverse V1, N2 and V2, Cortex-A710, Apple M2). The instruction bfmmla multiplies
// 2 rows x 4 values of k by 2 channels x 4 values. The first two products of a sum are added to each other and then to the
// sum, and after them the other two. Every step rounds to odd, and numbers below 2^-126 are zeros before and after it.
//
// A panel has 2 values of k of each channel, and the next 2 values are 64 bytes further, so two vectors are interleaved to
// two operands. A tile of many rows needs few of these interleavings: one for 5 products.
#include <arm_neon.h>

#include "halves.h"
#include "rows.h"

namespace lowbit {
namespace {

inline float32x4_t multiplied(float32x4_t sum, uint32x4_t rows, uint32x4_t weights) {
  return vbfmmlaq_f32(sum, vreinterpretq_bf16_u32(rows), vreinterpretq_bf16_u32(weights));
}

template <int R>
struct Multiply {
  static constexpr int PAIRS = (R + 1) / 2;

  static void run(const Tile& t) {
    float sums[2][PAIRS][4][4] = {};
    constexpr int UNITS = DEPTH / 4;
    for (int first = 0; first < t.units; first += UNITS)
      for (int half = 0; half < 2; ++half) {
        const int units = t.units - first < UNITS ? t.units - first : UNITS;
        multiply(static_cast<const uint32_t*>(t.x) + first * 4 * PAIRS,
                 static_cast<const uint32_t*>(t.w) + first * 2 * CHANNELS + half * WIDE, units, sums[half]);
      }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < CHANNELS; ++c) t.out[r * CHANNELS + c] = sums[c / WIDE][r / 2][c % WIDE / 2][r % 2 * 2 + c % 2];
  }

  // Add the products of `units` times 4 values of k to the sums of WIDE channels. A vector of sums is [row 0 channel 0, row 0
  // channel 1, row 1 channel 0, row 1 channel 1].
  static void multiply(const uint32_t* x, const uint32_t* w, int units, float (&out)[PAIRS][4][4]) {
    float32x4_t sums[PAIRS][4];
#pragma GCC unroll 8
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[p][v] = vld1q_f32(out[p][v]);
    for (int u = 0; u < units; ++u, x += 4 * PAIRS, w += 2 * CHANNELS) {
      uint32x4_t rows[PAIRS];
#pragma GCC unroll 8
      for (int p = 0; p < PAIRS; ++p) rows[p] = vld1q_u32(x + 4 * p);
#pragma GCC unroll 2
      for (int v = 0; v < 4; v += 2) {
        const uint32x4_t first = vld1q_u32(w + 2 * v), second = vld1q_u32(w + CHANNELS + 2 * v);
        const uint32x4_t low = vzip1q_u32(first, second), high = vzip2q_u32(first, second);
#pragma GCC unroll 8
        for (int p = 0; p < PAIRS; ++p) sums[p][v] = multiplied(sums[p][v], rows[p], low);
#pragma GCC unroll 8
        for (int p = 0; p < PAIRS; ++p) sums[p][v + 1] = multiplied(sums[p][v + 1], rows[p], high);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) vst1q_f32(out[p][v], sums[p][v]);
  }
};

const Halves HALVES = {BF16_ODD, HALVES_ROWS, round, Table<Multiply, HALVES_ROWS>::run, nullptr};

}  // namespace

const Halves* neon_bf16_halves() { return &HALVES; }

}  // namespace lowbit
