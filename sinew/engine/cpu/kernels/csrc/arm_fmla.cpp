// bfloat16 on NEON without instructions for bfloat16 (Cortex-A78AE of Jetson Orin, Neoverse N1). A bfloat16 number is the
// upper half of a float, so a shift or a mask converts it, and the instruction fmla adds a product with one rounding. A
// vector has 4 channels x 2 values of k. The first value of a channel is in the lower half of its 32 bits.
#include <arm_neon.h>

#include <utility>

#include "halves.h"
#include "row_vectors.h"
#include "rows.h"

namespace lowbit {
namespace {

inline float32x4_t first_of(uint32x4_t pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)); }
inline float32x4_t second_of(uint32x4_t pairs) { return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u))); }

// Add weights times one row to a sum. The product is written in assembler, because gcc 12 copies 6 of the sums in each step.
template <int LANE>
inline void add(float32x4_t& sum, float32x4_t weights, float32x4_t rows) {
  asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(weights), "w"(rows), "i"(LANE));
}

template <int R>
struct Multiply {
  using At = RowVectors<R>;

  template <int... ROW>
  static inline void add_rows(float32x4_t (&sums)[R][2], int v, float32x4_t weights, const float32x4_t* rows,
                              std::integer_sequence<int, ROW...>) {
    (add<At::lane_of(ROW)>(sums[ROW][v], weights, rows[At::vector_of(ROW)]), ...);
  }

  static void run(const Tile& t) {
    if (!t.more) std::memset(t.out, 0, R * CHANNELS * sizeof(float));
    constexpr int UNITS = DEPTH / 2;
    for (int first = 0; first < t.units; first += UNITS)
      for (int c = 0; c < CHANNELS; c += WIDE) {
        const int units = t.units - first < UNITS ? t.units - first : UNITS;
        multiply(static_cast<const uint32_t*>(t.x) + first * R, static_cast<const uint32_t*>(t.w) + first * CHANNELS + c, units,
                 t.out + c);
      }
  }

  // Add the products of `units` pairs of k to the sums of WIDE channels.
  static void multiply(const uint32_t* x, const uint32_t* w, int units, float* out) {
    constexpr std::make_integer_sequence<int, R> all{};
    float32x4_t sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sums[r][v] = vld1q_f32(out + r * CHANNELS + 4 * v);
    for (int u = 0; u < units; ++u, x += R, w += CHANNELS) {
      float32x4_t first[At::VECTORS], second[At::VECTORS];
#pragma GCC unroll 4
      for (int i = 0; i < At::VECTORS; ++i) {
        const uint32x4_t pairs = R < 4 ? vld1q_dup_u32(x + At::begin(i)) : vld1q_u32(x + At::begin(i));
        first[i] = first_of(pairs);
        second[i] = second_of(pairs);
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const uint32x4_t pairs = vld1q_u32(w + 4 * v);
        add_rows(sums, v, first_of(pairs), first, all);
        add_rows(sums, v, second_of(pairs), second, all);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) vst1q_f32(out + r * CHANNELS + 4 * v, sums[r][v]);
  }
};

const Halves HALVES = {BF16_FUSED, HALVES_ROWS, round, Table<Multiply, HALVES_ROWS>::run, nullptr, nullptr, ARM_DEPTH};

}  // namespace

const Halves* neon_fmla_halves() { return &HALVES; }

}  // namespace lowbit
