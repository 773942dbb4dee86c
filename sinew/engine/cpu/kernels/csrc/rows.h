// The operations of every kernel before its multiplication, in plain loops. Each instruction set compiles its own copy.
// The internal linkage is intended, because the linker must not use the copy of one set for all sets.
#pragma once
#include <cstring>

#include "kernels.h"

namespace lowbit {
namespace {

constexpr int CHUNK = 64;  // values of k that are expanded or packed at a time

#if defined(__clang__)
#define LOWBIT_SHUFFLE(a, b, w, x, y, z) __builtin_shufflevector(a, b, w, x, y, z)
#else
#define LOWBIT_SHUFFLE(a, b, w, x, y, z) __builtin_shuffle(a, b, (Quad){w, x, y, z})
#endif
typedef int32_t Quad __attribute__((vector_size(16)));
// 16 codes; shifts work on 32-bit words, because bytes have no shift.
typedef uint32_t Bits __attribute__((vector_size(16)));

inline Quad load_quad(const void* from) {
  Quad q;
  std::memcpy(&q, from, sizeof q);
  return q;
}

// Round floats [k] to int8 [k], half to even as torch.round. The largest magnitude becomes 127. If it is less than
// `smallest`, `smallest` would become 127. Return the scale by which values were multiplied. A row with a value that is
// not finite becomes zeros with a scale of NaN, so that invalid input never looks like numbers.
float quantize(const float* x, int64_t k, float smallest, int8_t* out) {
  int32_t top = 0;  // as integers, the bits of magnitudes have the same order as the magnitudes, with NaN last
  for (int64_t i = 0; i < k; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  if (top >= 0x7f800000) {
    std::memset(out, 0, k);
    return __builtin_nanf("");
  }
  float largest;
  std::memcpy(&largest, &top, 4);
  const float scale = 127.0f / (largest > smallest ? largest : smallest);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it moves the rounded integer to the low bits
  for (int64_t i = 0; i < k; ++i) {
    const float shifted = x[i] * scale + magic;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    out[i] = static_cast<int8_t>(bits - 0x4b400000);
  }
  return scale;
}

// Convert int8 [rows][k] to [k / unit][width][unit], with zeros in unused rows. k must be a multiple of 8.
template <int UNIT>
void pack_block(const int8_t* x, int64_t k, int rows, int width, void* block) {
  if (rows < width) std::memset(block, 0, k * width * (UNIT == 2 ? 2 : 1));
  for (int64_t at = 0; at < k; at += CHUNK) {
    const int size = static_cast<int>(k - at < CHUNK ? k - at : CHUNK);
    for (int r = 0; r < rows; ++r) {
      const int8_t* from = x + r * k + at;
      if (UNIT == 8) {
        uint64_t* to = static_cast<uint64_t*>(block) + at / 8 * width + r;
        for (int i = 0; i < size / 8; ++i) std::memcpy(to + i * width, from + 8 * i, 8);
      } else if (UNIT == 4) {
        uint32_t* to = static_cast<uint32_t*>(block) + at / 4 * width + r;
        for (int i = 0; i < size / 4; ++i) std::memcpy(to + i * width, from + 4 * i, 4);
      } else {
        int16_t wide[CHUNK];
        for (int i = 0; i < size; ++i) wide[i] = from[i];
        uint32_t* to = static_cast<uint32_t*>(block) + at / 2 * width + r;
        for (int i = 0; i < size / 2; ++i) std::memcpy(to + i * width, wide + 2 * i, 4);
      }
    }
  }
}

inline float half_to_float(uint16_t half) {
  const uint32_t exponent = half & 0x7c00u, magnitude = (half & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;  // this is also correct for subnormal numbers
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (exponent == 0x7c00u ? magnitude | 0x7f800000u : bits) | (half & 0x8000u) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Decode CHUNK codes of one row, from value `at` of k on. `at` must be a multiple of CHUNK. The function reads no byte
// after the row.
template <int FORMAT>
inline void decode(const uint8_t* row, int64_t at, int size, int8_t* codes) {
  if (FORMAT == TERNARY) {  // 16 bytes have 64 codes: bits 2i of byte j are value 16 i + j
    const uint8_t* from = row + at / 4;
    Bits packed;
    std::memcpy(&packed, from, 16);
    for (int i = 0; i < 4; ++i, packed >>= 2, codes += 16) {
      const Bits low = packed & 0x03030303u;
      std::memcpy(codes, &low, 16);
    }
  } else if (FORMAT == INT8) {
    std::memcpy(codes, row + at, size);
  } else {
    const int bytes = FORMAT == Q8_0 ? 34 : 18;
    const uint8_t* from = row + at / 32 * bytes + 2;
    for (int b = 0; b < size / 32; ++b, from += bytes, codes += 32) {
      if (FORMAT == Q8_0) {
        std::memcpy(codes, from, 32);
      } else {
        Bits packed;
        std::memcpy(&packed, from, 16);
        const Bits low = packed & 0x0f0f0f0fu, high = packed >> 4 & 0x0f0f0f0fu;
        std::memcpy(codes, &low, 16);
        std::memcpy(codes + 16, &high, 16);
      }
    }
  }
}

// Transpose int32 [CHANNELS][CHUNK / stride of 4 bytes] to [.][CHANNELS], in squares of four.
inline void transpose(const int32_t* rows, int row_words, int words, int32_t* panel) {
  int u = 0;
  for (; u + 4 <= words; u += 4)
    for (int c = 0; c < CHANNELS; c += 4) {
      const int32_t* from = rows + c * row_words + u;
      const Quad a = load_quad(from), b = load_quad(from + row_words);
      const Quad d = load_quad(from + 2 * row_words), e = load_quad(from + 3 * row_words);
      const Quad ab0 = LOWBIT_SHUFFLE(a, b, 0, 4, 1, 5), ab1 = LOWBIT_SHUFFLE(a, b, 2, 6, 3, 7);
      const Quad de0 = LOWBIT_SHUFFLE(d, e, 0, 4, 1, 5), de1 = LOWBIT_SHUFFLE(d, e, 2, 6, 3, 7);
      const Quad columns[4] = {LOWBIT_SHUFFLE(ab0, de0, 0, 1, 4, 5), LOWBIT_SHUFFLE(ab0, de0, 2, 3, 6, 7),
                               LOWBIT_SHUFFLE(ab1, de1, 0, 1, 4, 5), LOWBIT_SHUFFLE(ab1, de1, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) std::memcpy(panel + (u + i) * CHANNELS + c, &columns[i], sizeof(Quad));
    }
  for (; u < words; ++u)
    for (int c = 0; c < CHANNELS; ++c) panel[u * CHANNELS + c] = rows[c * row_words + u];
}

inline int rows_of(const Weights& w, int64_t channel) {
  return static_cast<int>(w.channels - channel < CHANNELS ? w.channels - channel : CHANNELS);
}

// Expand the scales of CHANNELS rows, from `channel` on, to [groups][CHANNELS]. If the rows contain scales, only the
// groups of the values `at` to `end` are read, together with their codes. A separate pass over such short rows would
// take as long again. Rows after the last row get zeros.
template <int FORMAT>
inline void expand_scales(const Weights& w, int64_t channel, int64_t at, int64_t end, float* scales) {
  const int rows = rows_of(w, channel);
  if (FORMAT == TERNARY || FORMAT == INT8 || FORMAT == INT8_PANELS) {
    for (int c = 0; c < CHANNELS; ++c) scales[c] = c < rows ? w.scale[w.scales == 1 ? 0 : channel + c] : 0.0f;
    return;
  }
  const int64_t bytes = row_bytes(FORMAT, w.k);
  const int block = FORMAT == Q8_0 ? 34 : 18;
  for (int64_t g = at / 32; g < end / 32; ++g) {
    uint16_t halves[CHANNELS] = {};
    for (int c = 0; c < rows; ++c) std::memcpy(halves + c, w.data + (channel + c) * bytes + g * block, 2);
    for (int c = 0; c < CHANNELS; ++c) scales[g * CHANNELS + c] = half_to_float(halves[c]);
  }
}

// Expand CHANNELS rows of weights, from `channel` on, to a panel [k / unit][CHANNELS][unit] and scales
// [groups][CHANNELS]. Rows after the last row are zeros with a scale of zero. k is padded to a multiple of 8.
template <int FORMAT, int UNIT, int BIAS>
void expand_panel(const Weights& w, int64_t channel, void* panel, float* scales) {
  const int64_t bytes = row_bytes(FORMAT, w.k), padded = round_up(w.k, 8);
  const int rows = rows_of(w, channel);
  const uint8_t* first = w.data + channel * bytes;
  alignas(64) int8_t codes[CHANNELS][CHUNK];
  std::memset(codes, 0, sizeof codes);
  for (int64_t at = 0; at < padded; at += CHUNK) {
    const int size = static_cast<int>(padded - at < CHUNK ? padded - at : CHUNK);
    const int there = static_cast<int>(w.k - at < CHUNK ? w.k - at : CHUNK);
    for (int c = 0; c < rows; ++c) {
      decode<FORMAT>(first + c * bytes, at, there, codes[c]);
      if (BIAS)
        for (int i = 0; i < CHUNK; ++i) codes[c][i] = static_cast<int8_t>(codes[c][i] ^ BIAS);
    }
    if (UNIT == 8) {
      uint64_t* to = static_cast<uint64_t*>(panel) + at / 8 * CHANNELS;
      for (int i = 0; i < size / 8; ++i)
        for (int c = 0; c < CHANNELS; ++c) std::memcpy(to + i * CHANNELS + c, codes[c] + 8 * i, 8);
    } else {
      transpose(reinterpret_cast<int32_t*>(codes), CHUNK / 4, size / 4, static_cast<int32_t*>(panel) + at / 4 * CHANNELS);
    }
    if (TRAITS[FORMAT].group || at == 0) expand_scales<FORMAT>(w, channel, at, at + there, scales);
  }
}

template <int UNIT, int WIDE_UNIT, int BIAS>
void expand(const Weights& w, int64_t channel, void* panel, float* scales, int32_t*) {
  switch (w.format) {
    case TERNARY: return expand_panel<TERNARY, UNIT, 0>(w, channel, panel, scales);
    case Q4_0: return expand_panel<Q4_0, UNIT, 0>(w, channel, panel, scales);
    case INT8: return expand_panel<INT8, WIDE_UNIT, BIAS>(w, channel, panel, scales);
    case INT8_PANELS:
    case INT8_FOURS:
    case INT8_EIGHTS: return expand_scales<INT8_PANELS>(w, channel, 0, w.k, scales);
    default: return expand_panel<Q8_0, WIDE_UNIT, BIAS>(w, channel, panel, scales);
  }
}

template <int UNIT, int WIDE_UNIT>
void pack(const int8_t* x, int64_t k, int rows, int width, int wide, void* block) {
  if (wide)
    pack_block<WIDE_UNIT>(x, k, rows, width, block);
  else
    pack_block<UNIT>(x, k, rows, width, block);
}

// Compute y = out * inverse + bias: two roundings, in this order.
template <int COUNT>
inline void finish_row(const float* __restrict out, int count, float inverse, const float* __restrict bias,
                       float* __restrict y) {
  const int n = COUNT ? COUNT : count;
  if (bias == nullptr) {
    for (int i = 0; i < n; ++i) y[i] = out[i] * inverse;
  } else {
    for (int i = 0; i < n; ++i) {
      const float scaled = out[i] * inverse;
      y[i] = scaled + bias[i];
    }
  }
}

void finish(const float* out, int rows, int there, const float* inverses, const float* bias, float* y, int64_t stride) {
  for (int r = 0; r < rows; ++r, out += CHANNELS, y += stride) {
    if (there == CHANNELS)
      finish_row<CHANNELS>(out, there, inverses[r], bias, y);
    else
      finish_row<0>(out, there, inverses[r], bias, y);
  }
}

// One function for each number of rows. The number of rows chooses the function.
template <template <int> class Multiply, int ROWS>
struct Table {
  static void run(const Tile& t) {
    if (t.rows == ROWS)
      Multiply<ROWS>::run(t);
    else
      Table<Multiply, ROWS - 1>::run(t);
  }
};
template <template <int> class Multiply>
struct Table<Multiply, 0> {
  static void run(const Tile&) {}
};

}  // namespace
}  // namespace lowbit
