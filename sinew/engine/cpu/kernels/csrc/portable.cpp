// Kernels for any CPU, which the compiler makes from plain loops.
#include "jpeg.h"
#include "rows.h"

namespace lowbit {
namespace {

constexpr int ROWS = 4;

template <int R>
struct Multiply {
  static void run(const Tile& t) {
    const int8_t* x = static_cast<const int8_t*>(t.x);
    const int8_t* w = static_cast<const int8_t*>(t.w);
    std::memset(t.out, 0, R * CHANNELS * sizeof(float));
    for (int g = 0; g < t.groups; ++g) {
      int32_t sums[R][CHANNELS] = {};
      for (int u = 0; u < t.units; ++u, x += 4 * R, w += 4 * CHANNELS)
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < CHANNELS; ++c)
            for (int i = 0; i < 4; ++i) sums[r][c] += x[4 * r + i] * w[4 * c + i];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < CHANNELS; ++c) {
          const float scaled = static_cast<float>(sums[r][c] - t.offsets[g * R + r]) * t.scales[g * CHANNELS + c];
          t.out[r * CHANNELS + c] += scaled;
        }
    }
  }
};

const auto MULTIPLY = Table<Multiply, ROWS>::run;
const Kernels PORTABLE = {
    "portable", {ROWS, ROWS, ROWS, ROWS}, 0, 4, 4, 0, {MULTIPLY, MULTIPLY, MULTIPLY, MULTIPLY}, quantize, expand<4, 4, 0>, pack<4, 4>,
    finish, resize, resample, jpeg, nullptr,
};

}  // namespace

const Kernels* portable_kernels() { return &PORTABLE; }

}  // namespace lowbit
