// NEON with int8 matrix products (ARMv8.6: Cortex-A710 and newer, Neoverse V1, Apple M2). The instruction smmla
// multiplies 2 rows x 8 values of k by 2 channels x 8 values. Rows are therefore processed in pairs, and a unit has 8
// values.
#include <arm_neon.h>

#include "jpeg.h"
#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 6;  // 3 pairs of rows x 8 pairs of channels: 24 sums in 32 registers

template <int R>
struct Multiply {
  static constexpr int PAIRS = (R + 1) / 2;

  static void run(const Tile& t) {
    const int8_t* x = static_cast<const int8_t*>(t.x);
    const int8_t* w = static_cast<const int8_t*>(t.w);
    int32_t* const waiting = reinterpret_cast<int32_t*>(t.out);  // the sums between two parts of k
    float32x4_t out[R][4];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 4; ++v) out[r][v] = vdupq_n_f32(0);
    for (int g = 0; g < t.groups; ++g) {
      const int32_t* offsets = t.offsets + g * t.width;
      int32x4_t sums[PAIRS][8];  // [row 0 channel 0, row 0 channel 1, row 1 channel 0, row 1 channel 1]
#pragma GCC unroll 4
      for (int p = 0; p < PAIRS; ++p) {
        const int32x4_t least = vcombine_s32(vdup_n_s32(-offsets[2 * p]), vdup_n_s32(2 * p + 1 < R ? -offsets[2 * p + 1] : 0));
        for (int c = 0; c < 8; ++c) sums[p][c] = t.more ? vld1q_s32(waiting + (p * 8 + c) * 4) : least;
      }
      for (int u = 0; u < t.units; ++u, x += 16 * PAIRS, w += 8 * CHANNELS) {
        int8x16_t rows[PAIRS];
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; ++p) rows[p] = vld1q_s8(x + 16 * p);
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
          const int8x16_t codes = vld1q_s8(w + 16 * c);
#pragma GCC unroll 4
          for (int p = 0; p < PAIRS; ++p) sums[p][c] = vmmlaq_s32(sums[p][c], rows[p], codes);
        }
      }
      if (t.part) {
        for (int p = 0; p < PAIRS; ++p)
          for (int c = 0; c < 8; ++c) vst1q_s32(waiting + (p * 8 + c) * 4, sums[p][c]);
        return;
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) {
          const int64x2_t a = vreinterpretq_s64_s32(sums[r / 2][2 * v]);
          const int64x2_t b = vreinterpretq_s64_s32(sums[r / 2][2 * v + 1]);
          const int32x4_t sum = vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
          const float32x4_t scales = vld1q_f32(t.scales + g * CHANNELS + 4 * v);
          out[r][v] = vaddq_f32(out[r][v], vmulq_f32(vcvtq_f32_s32(sum), scales));
        }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 4; ++v) vst1q_f32(t.out + r * CHANNELS + 4 * v, out[r][v]);
  }
};

const auto MULTIPLY = Table<Multiply, ROWS>::run;
const Kernels I8MM = {
    "neon-i8mm", {ROWS, ROWS, ROWS, ROWS}, 1, 8, 8, 0, {MULTIPLY, MULTIPLY, MULTIPLY, MULTIPLY}, quantize, expand<8, 8, 0>, pack<8, 8>,
    finish, resize, resample, jpeg, nullptr, {}, ARM_DEPTH,
};

}  // namespace

const Kernels* neon_i8mm_kernels() { return &I8MM; }

}  // namespace lowbit
