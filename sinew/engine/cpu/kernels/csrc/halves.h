// The parts that the kernels of bfloat16 on ARM share: their sizes, and the rounding of activations.
//
// A tile has 10 rows x 8 channels, because its 20 sums and their operands fit the 32 registers. A panel is read twice, for
// 8 channels each time, so a kernel multiplies DEPTH values of k at a time. Their 10 KiB of activations and 16 KiB of weights
// stay in a first-level cache of 64 KiB. The sums wait in memory between two parts of k, and the order of additions stays.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace lowbit {
namespace {

constexpr int HALVES_ROWS = 10;
constexpr int WIDE = CHANNELS / 2;  // channels that are multiplied together
constexpr int DEPTH = 512;          // values of k

// Round to bfloat16, to nearest even. Small numbers are not flushed, and NaN stays NaN.
void round(const float* x, int64_t k, int8_t* out) {
  for (int64_t i = 0; i < k; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const uint32_t nearest = bits + 0x7fffu + (bits >> 16 & 1);
    const uint32_t made = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : nearest;
    const uint16_t half = static_cast<uint16_t>(made >> 16);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

}  // namespace
}  // namespace lowbit
