// NEON with the dot product (ARMv8.2: Cortex-A76 and -A78, Jetson Orin, Raspberry Pi 5, Apple M1). The instruction sdot
// adds 4 signed products to a 32-bit lane. A vector has 4 channels x 4 values of k, and a panel has four such vectors.
#include <arm_neon.h>

#include <utility>

#include "jpeg.h"
#include "row_vectors.h"
#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 6;  // 6 rows x 4 vectors: 24 sums, 4 vectors of codes and 2 of rows use 30 of 32 registers

template <int R>
struct Multiply {
  using At = RowVectors<R>;

  template <int... ROW>
  static inline void add_rows(int32x4_t (&sums)[R][4], int v, int8x16_t codes, const int8x16_t* rows,
                              std::integer_sequence<int, ROW...>) {
    ((sums[ROW][v] = vdotq_laneq_s32(sums[ROW][v], codes, rows[At::vector_of(ROW)], At::lane_of(ROW))), ...);
  }

  static void run(const Tile& t) {
    const int32_t* x = static_cast<const int32_t*>(t.x);
    const int8_t* w = static_cast<const int8_t*>(t.w);
    int32_t* const waiting = reinterpret_cast<int32_t*>(t.out);  // the sums between two parts of k
    if (!t.more) std::memset(t.out, 0, R * CHANNELS * sizeof(float));
    for (int g = 0; g < t.groups; ++g) {
      int32x4_t sums[R][4];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) sums[r][v] = t.more ? vld1q_s32(waiting + r * CHANNELS + 4 * v) : vdupq_n_s32(-t.offsets[g * R + r]);
      for (int u = 0; u < t.units; ++u, x += R, w += 4 * CHANNELS) {
        int8x16_t rows[At::VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < At::VECTORS; ++i)
          rows[i] = vreinterpretq_s8_s32(R < 4 ? vld1q_dup_s32(x + At::begin(i)) : vld1q_s32(x + At::begin(i)));
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) add_rows(sums, v, vld1q_s8(w + 16 * v), rows, std::make_integer_sequence<int, R>());
      }
      if (t.part) {
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < 4; ++v) vst1q_s32(waiting + r * CHANNELS + 4 * v, sums[r][v]);
        return;
      }
      if (t.more) std::memset(t.out, 0, R * CHANNELS * sizeof(float));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          float* out = t.out + r * CHANNELS + 4 * v;
          const float32x4_t scaled = vmulq_f32(vcvtq_f32_s32(sums[r][v]), vld1q_f32(t.scales + g * CHANNELS + 4 * v));
          vst1q_f32(out, vaddq_f32(vld1q_f32(out), scaled));
        }
    }
  }
};

const auto MULTIPLY = Table<Multiply, ROWS>::run;
const Kernels DOTPROD = {
    "neon-dotprod", {ROWS, ROWS, ROWS, ROWS}, 0, 4, 4, 0, {MULTIPLY, MULTIPLY, MULTIPLY, MULTIPLY}, quantize, expand<4, 4, 0>, pack<4, 4>,
    finish, resize, resample, jpeg, nullptr, {}, ARM_DEPTH,
};

}  // namespace

const Kernels* neon_dotprod_kernels() { return &DOTPROD; }

}  // namespace lowbit
