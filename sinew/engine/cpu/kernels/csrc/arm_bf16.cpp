// NEON with matrix products of bfloat16 (Neoverse V1, N2 and V2, Cortex-A710, Apple M2). The instruction bfmmla multiplies
// 2 rows x 4 values of k by 2 channels x 4 values. The first two products of a sum are added to each other and then to the
// sum, and after them the other two. Every step rounds to odd, and numbers below 2^-126 are zeros before and after it.
//
// A panel has 2 values of k of each channel, and the next 2 values are 64 bytes further, so two vectors are interleaved to
// two operands. A tile of many rows needs few of these interleavings: one for 5 products.
#include <arm_neon.h>

#define LOWBIT_VECTOR 16
#include "attend_halves.h"
#include "halves.h"

namespace lowbit {
namespace {

inline float32x4_t multiplied(float32x4_t sum, uint32x4_t rows, uint32x4_t weights) {
  return vbfmmlaq_f32(sum, vreinterpretq_bf16_u32(rows), vreinterpretq_bf16_u32(weights));
}

template <int R>
struct Multiply {
  static constexpr int PAIRS = (R + 1) / 2;

  static void run(const Tile& t) {
    constexpr int UNITS = DEPTH / 4;
    for (int first = 0; first < t.units; first += UNITS)
      for (int c = 0; c < CHANNELS; c += WIDE) {
        const int units = t.units - first < UNITS ? t.units - first : UNITS;
        multiply(static_cast<const uint32_t*>(t.x) + first * 4 * PAIRS,
                 static_cast<const uint32_t*>(t.w) + first * 2 * CHANNELS + c, units, t.out + c, t.more || first > 0);
      }
  }

  // Four channels of two rows are in two vectors: one vector for each row, or, for bfmmla, one vector for each pair of
  // channels: [row 0 channel 0, row 0 channel 1, row 1 channel 0, row 1 channel 1]. Convert one to the other.
  static void turn(float32x4_t& first, float32x4_t& second) {
    const float64x2_t a = vreinterpretq_f64_f32(first), b = vreinterpretq_f64_f32(second);
    first = vreinterpretq_f32_f64(vzip1q_f64(a, b));
    second = vreinterpretq_f32_f64(vzip2q_f64(a, b));
  }

  // Compute the products of `units` times 4 values of k with WIDE channels, and add them to the sums in `out` if `more`.
  static void multiply(const uint32_t* x, const uint32_t* w, int units, float* out, bool more) {
    const auto row = [&](int r) { return more && r < R ? out + r * CHANNELS : nullptr; };
    const auto sum = [&](const float* from, int v) { return from == nullptr ? vdupq_n_f32(0) : vld1q_f32(from + 2 * v); };
    float32x4_t sums[PAIRS][4];
#pragma GCC unroll 8
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < 4; v += 2) {
        sums[p][v] = sum(row(2 * p), v);
        sums[p][v + 1] = sum(row(2 * p + 1), v);
        turn(sums[p][v], sums[p][v + 1]);
      }
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
#pragma GCC unroll 2
      for (int v = 0; v < 4; v += 2) {
        turn(sums[p][v], sums[p][v + 1]);
        vst1q_f32(out + 2 * p * CHANNELS + 2 * v, sums[p][v]);
        if (2 * p + 1 < R) vst1q_f32(out + (2 * p + 1) * CHANNELS + 2 * v, sums[p][v + 1]);
      }
  }
};

const auto MULTIPLY = Table<Multiply, HALVES_ROWS>::run;

// The products of attention (attend_halves.h), with 10 queries at a time. Scores and results are the results of tiles.
class Products {
 public:
  static constexpr int ROWS = HALVES_ROWS;
  static void round(const float* x, int64_t k, int8_t* out) { lowbit::round(x, k, out); }

  Products(int64_t padded, int64_t width, int64_t size, char* memory)
      : padded_(padded), width_(width), units_(static_cast<int>((size + 3) / 4)), queries_(memory),
        weights_(queries_ + 2 * ROWS * width), scores_(reinterpret_cast<float*>(weights_ + 2 * ROWS * padded)),
        out_(scores_ + ROWS * padded) {}

  float* scores(int64_t row, int64_t panel) const { return scores_ + (panel * ROWS + row) * CHANNELS; }
  const float* results(int64_t row, int64_t panel) const { return out_ + (panel * ROWS + row) * CHANNELS; }
  void weigh(int64_t row, int64_t i, int v, Words both) const {  // two units with 4 keys each
    char* to = weights_ + ((i / 4 + 2 * v) * tall_ + row) * 8;
    std::memcpy(to, &both, 8);
    std::memcpy(to + 8 * tall_, reinterpret_cast<const char*>(&both) + 8, 8);
  }

  void multiply_keys(const int8_t* lines, int64_t rows, const char* keys) {
    tall_ = round_up(rows, 2);
    pack_block<8>(lines, 2 * width_, static_cast<int>(rows), static_cast<int>(tall_), queries_);
    if (rows < tall_)
      for (int64_t u = 0; u < padded_ / 4; ++u) std::memset(weights_ + (u * tall_ + rows) * 8, 0, 8);
    each(padded_, rows, queries_, keys, 2 * CHANNELS * width_, units_, scores_);
  }

  void multiply_values(int64_t rows, const char* values) const {
    each(width_, rows, weights_, values, 2 * CHANNELS * padded_, static_cast<int>(padded_ / 4), out_);
  }

 private:
  // Multiply a block by the panels of `channels`, which are `apart` bytes apart.
  static void each(int64_t channels, int64_t rows, const char* block, const char* panel, int64_t apart, int units, float* out) {
    Tile tile = {};
    tile.x = block;
    tile.rows = static_cast<int>(rows);
    tile.units = units;
    for (int64_t c = 0; c < channels; c += CHANNELS, panel += apart, out += ROWS * CHANNELS) {
      tile.w = panel;
      tile.out = out;
      MULTIPLY(tile);
    }
  }

  const int64_t padded_, width_;
  const int units_;  // of 4 values of a query
  int64_t tall_ = 0;  // rows of a block
  char* const queries_;  // [width / 4][rows][4], in bfloat16
  char* const weights_;  // [padded / 4][rows][4], in bfloat16
  float* const scores_;  // [padded / 16][ROWS][16]
  float* const out_;     // [width / 16][ROWS][16]
};

const Halves HALVES = {BF16_ODD, HALVES_ROWS, round, MULTIPLY, nullptr, attend_halves<Products>, ARM_DEPTH};

}  // namespace

const Halves* neon_bf16_halves() { return &HALVES; }

}  // namespace lowbit
