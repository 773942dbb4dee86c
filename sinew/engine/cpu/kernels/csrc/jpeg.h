// A frame after TensorFlow has written and read it as JPEG. The result equals sinew/steps/image/jpeg.py, which computes
// the same with numpy and states its sources. The code processes sixteen lines at a time. The last decoded line waits
// for the chroma line below it.
#pragma once
#include "frames.h"

namespace lowbit {
namespace {

typedef Ints Lanes[8];  // eight values for each of several blocks

constexpr int fixed(double x, int bits) { return static_cast<int>(x * (1 << bits) + 0.5); }

// The accurate forward transform. Its sums have 13 binary places that the shift removes.
template <int SHIFT>
inline void forward(Lanes& x) {
  constexpr auto c = [](double value) { return fixed(value, 13); };
  constexpr int half = 1 << (SHIFT - 1);
  const Ints s0 = x[0] + x[7], s1 = x[1] + x[6], s2 = x[2] + x[5], s3 = x[3] + x[4];
  const Ints d0 = x[0] - x[7], d1 = x[1] - x[6], d2 = x[2] - x[5], d3 = x[3] - x[4];
  const Ints outer = s0 + s3, inner = s1 + s2, z1 = (s0 - s3 + s1 - s2) * c(0.541196100) + half;
  const Ints z5 = (d0 + d1 + d2 + d3) * c(1.175875602) + half;
  const Ints a = (d0 + d3) * c(0.899976223), b = (d1 + d2) * c(2.562915447);
  const Ints e = z5 - (d1 + d3) * c(1.961570560), f = z5 - (d0 + d2) * c(0.390180644);
  x[0] = (((outer + inner) << 13) + half) >> SHIFT;
  x[1] = (d0 * c(1.501321110) - a + f) >> SHIFT;
  x[2] = (z1 + (s0 - s3) * c(0.765366865)) >> SHIFT;
  x[3] = (d1 * c(3.072711026) - b + e) >> SHIFT;
  x[4] = (((outer - inner) << 13) + half) >> SHIFT;
  x[5] = (d2 * c(2.053119869) - b + f) >> SHIFT;
  x[6] = (z1 - (s1 - s2) * c(1.847759065)) >> SHIFT;
  x[7] = (d3 * c(0.298631336) - a + e) >> SHIFT;
}

// The fast inverse transform, which cuts its products.
inline void inverse(Lanes& x) {
  const auto times = [](Ints value, double factor) { return (value * fixed(factor, 8)) >> 8; };
  const Ints a = x[0] + x[4], b = x[0] - x[4], d = x[2] + x[6], e = times(x[2] - x[6], 1.414213562) - d;
  const Ints even0 = a + d, even1 = b + e, even2 = b - e, even3 = a - d;
  const Ints z13 = x[5] + x[3], z10 = x[5] - x[3], z11 = x[1] + x[7], z12 = x[1] - x[7];
  const Ints z5 = times(z10 + z12, 1.847759065), o7 = z11 + z13, o6 = times(-z10, 2.613125930) + z5 - o7;
  const Ints o5 = times(z11 - z13, 1.414213562) - o6, o4 = times(z12, 1.082392200) - z5 + o5;
  x[0] = even0 + o7, x[7] = even0 - o7;
  x[1] = even1 + o6, x[6] = even1 - o6;
  x[2] = even2 + o5, x[5] = even2 - o5;
  x[3] = even3 - o4, x[4] = even3 + o4;
}

// Round to the nearest multiple of a step, halves away from zero. A number that is not a half differs from the nearest
// half by at least 1 / 2040, which is more than the error of the sum.
inline Ints quantised(Ints value, float inverse, int32_t step) {
  const Reals scaled = __builtin_convertvector(value, Reals) * inverse;
  const Ints half = ((Ints)scaled & INT32_MIN) | 0x3f001000;  // 1/2 + 2^-12 with the sign of the value
  return __builtin_convertvector(scaled + (Reals)half, Ints) * step;
}

// Transform, quantise and restore TOGETHER blocks side by side, in place.
inline void code(uint8_t* lines, int64_t stride, const float* inverses, const int32_t* steps) {
  Ints kept[64][WORDS];
  alignas(64) uint8_t bytes[8][TOGETHER];
  Octets square[8];
  Lanes x;
  for (int v = 0; v < 8; ++v) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) square[i] = loaded<Octets>(lines + v * stride + i * TOGETHER);
    turn<Octets, 8, 16>(square);
    std::memcpy(bytes, square, sizeof bytes);
    for (int word = 0; word < WORDS; ++word) {
#pragma GCC unroll 8
      for (int u = 0; u < 8; ++u) x[u] = widened(bytes[u], word, Ints{});
      forward<11>(x);
      x[0] -= 8 * 128 << 2;
#pragma GCC unroll 8
      for (int u = 0; u < 8; ++u) kept[8 * v + u][word] = x[u];
    }
  }
  for (int u = 0; u < 8; ++u)
    for (int word = 0; word < WORDS; ++word) {
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) x[v] = kept[8 * v + u][word];
      forward<15>(x);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) x[v] = quantised(x[v], inverses[8 * v + u], steps[8 * v + u]);
      inverse(x);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) kept[8 * v + u][word] = x[v];
    }
  for (int v = 0; v < 8; ++v) {
    Ints made[8][WORDS];
    for (int word = 0; word < WORDS; ++word) {
#pragma GCC unroll 8
      for (int u = 0; u < 8; ++u) x[u] = kept[8 * v + u][word];
      inverse(x);
#pragma GCC unroll 8
      for (int u = 0; u < 8; ++u) made[u][word] = x[u] + (128 << 5);
    }
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u) {
      finish_sums(made[u], 5, bytes[u]);
      square[u] = loaded<Octets>(bytes[u]);
    }
    turn(square);
    std::memcpy(lines + v * stride, square, sizeof square);
  }
}

// Convert a line of pixels to luma, and to the two chroma lines that are halved later. The last pixel is repeated up to
// `padded`.
inline void to_ycc(const uint8_t* __restrict line, int64_t width, int64_t padded, uint8_t* __restrict y,
                   uint8_t* __restrict cb, uint8_t* __restrict cr) {
  constexpr auto c = [](double value) { return fixed(value, 16); };
  constexpr int half = 1 << 15, middle = (128 << 16) + half - 1;
  for (int64_t i = 0; i < width; ++i) {
    const int r = line[3 * i], g = line[3 * i + 1], b = line[3 * i + 2];
    y[i] = static_cast<uint8_t>((c(0.299) * r + c(0.587) * g + c(0.114) * b + half) >> 16);
    cb[i] = static_cast<uint8_t>((half * b - c(0.16874) * r - c(0.33126) * g + middle) >> 16);
    cr[i] = static_cast<uint8_t>((half * r - c(0.41869) * g - c(0.08131) * b + middle) >> 16);
  }
  for (uint8_t* each : {y, cb, cr}) std::memset(each + width, each[width - 1], padded - width);
}

// Compute the means of 2 x 2 squares, rounded down and up in turn.
inline void halve(const uint8_t* __restrict upper, const uint8_t* __restrict lower, int64_t count, uint8_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i)
    to[i] = static_cast<uint8_t>((upper[2 * i] + upper[2 * i + 1] + lower[2 * i] + lower[2 * i + 1] + 1 + (i & 1)) >> 2);
}

// Enlarge a chroma line to twice its width, from the nearer and the farther line. `sums` must have one free element on
// both sides.
inline void twice(const uint8_t* __restrict near, const uint8_t* __restrict far, int64_t count, uint16_t* __restrict sums,
                  uint8_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<uint16_t>(3 * near[i] + far[i]);
  sums[-1] = sums[0], sums[count] = sums[count - 1];
  for (int64_t i = 0; i < count; ++i) {
    to[2 * i] = static_cast<uint8_t>((3 * sums[i] + sums[i - 1] + 8) >> 4);
    to[2 * i + 1] = static_cast<uint8_t>((3 * sums[i] + sums[i + 1] + 7) >> 4);
  }
}

inline void to_rgb(const uint8_t* __restrict y, const uint8_t* __restrict cb, const uint8_t* __restrict cr, int64_t width,
                   uint8_t* __restrict to) {
  constexpr auto c = [](double value) { return fixed(value, 16); };
  constexpr int half = 1 << 15;
  const auto cut = [](int value) { return static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value); };
  for (int64_t i = 0; i < width; ++i) {
    const int blue = cb[i] - 128, red = cr[i] - 128;
    to[3 * i] = cut(y[i] + ((c(1.402) * red + half) >> 16));
    to[3 * i + 1] = cut(y[i] + ((-c(0.34414) * blue - c(0.71414) * red + half) >> 16));
    to[3 * i + 2] = cut(y[i] + ((c(1.772) * blue + half) >> 16));
  }
}

// Compute a JPEG round trip (see RoundTrip).
void jpeg(const RoundTrip& r, uint8_t* memory) {
  const int64_t stride = r.stride(), padded = round_up(r.width, 16), half = padded / 2;
  const int64_t rows = (r.height + 1) / 2, columns = (r.width + 1) / 2;
  uint8_t *luma = memory, *chroma = luma + 32 * stride, *lines = chroma + 16 * stride;
  uint16_t* sums = reinterpret_cast<uint16_t*>(lines + 4 * stride) + 32;
  const auto luma_at = [&](int64_t line) { return luma + (line & 31) * stride; };
  // The first half of a row is blue chroma, the second half is red chroma.
  const auto chroma_at = [&](int64_t row) { return chroma + (row & 15) * stride; };
  int64_t done = 0;
  for (int64_t begin = 0; begin < r.height; begin += 16) {
    for (int64_t y = begin; y < begin + 16; y += 2) {
      // Repeat the last line of luma, and the last row of chroma, which already has averages.
      if (y >= r.height) {
        for (const int64_t each : {y, y + 1}) std::memcpy(luma_at(each), luma_at(r.height - 1), stride);
        std::memcpy(chroma_at(y / 2), chroma_at(rows - 1), stride);
        continue;
      }
      for (const int64_t each : {0, 1}) {
        const int64_t from = y + each < r.height ? y + each : y;
        to_ycc(r.frame + from * r.row_bytes, r.width, padded, luma_at(y + each), lines + 2 * each * stride,
               lines + (2 * each + 1) * stride);
      }
      for (const int64_t each : {0, 1})
        halve(lines + each * stride, lines + (2 + each) * stride, half, chroma_at(y / 2) + each * half);
    }
    for (int64_t x = 0; x < padded; x += 8 * TOGETHER) {
      for (const int64_t y : {begin, begin + 8}) code(luma_at(y) + x, stride, r.inverses, r.steps);
      code(chroma_at(begin / 2) + x, stride, r.inverses + 64, r.steps + 64);
    }
    const bool last = begin + 16 >= r.height;
    for (; done < (last ? r.height : begin + 15); ++done) {
      const int64_t row = done / 2, other = done % 2 ? row + 1 : row - 1;
      const int64_t far = other < 0 ? 0 : other < rows ? other : rows - 1;
      for (const int64_t each : {0, 1})
        twice(chroma_at(row) + each * half, chroma_at(far) + each * half, columns, sums, lines + each * stride);
      to_rgb(luma_at(done), lines, lines + stride, r.width, r.out + 3 * done * r.width);
    }
  }
}

}  // namespace
}  // namespace lowbit
