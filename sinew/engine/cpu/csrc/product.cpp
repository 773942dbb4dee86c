// The product of a layer, and the C interface that sinew/engine/cpu/library.py calls.
#include "buffer.h"
#include "kernels.h"
#include "pool.h"

namespace lowbit {
namespace {

constexpr int PANELS = 4;                    // that a task multiplies, at most: rows stay in the first cache meanwhile
constexpr int64_t PANELS_BYTES = 256 << 10;  // half of a second cache of 512 KiB

struct Call {
  const Kernels* kernels;
  Weights weights;
  const float *x, *bias;
  float* y;
  float smallest;
  int64_t rows;

  // Derived.
  Traits traits;
  int wide, unit, bytes, offset, groups, units, width;
  int64_t padded, blocks;

  void plan() {
    traits = TRAITS[weights.format];
    wide = traits.width == EIGHT_BITS;
    unit = wide ? kernels->wide_unit : kernels->unit;
    bytes = unit == 2 ? 2 : 1;
    offset = traits.offset + (wide ? kernels->wide_bias : 0);
    padded = round_up(weights.k, 8);
    groups = traits.group ? static_cast<int>(weights.k / traits.group) : 1;
    units = static_cast<int>((traits.group ? traits.group : padded) / unit);
    blocks = (rows + kernels->rows - 1) / kernels->rows;
    width = static_cast<int>((rows + blocks - 1) / blocks);
    if (kernels->even) width = static_cast<int>(round_up(width, 2));
  }
  // Blocks differ by one row at most: a small last one would leave most of the multipliers idle.
  int64_t first(int64_t block) const {
    const int64_t more = rows % blocks;
    return rows / blocks * block + (block < more ? block : more);
  }
  int size(int64_t block) const { return static_cast<int>(first(block + 1) - first(block)); }
  int width_of(int64_t block) const { return kernels->even ? static_cast<int>(round_up(size(block), 2)) : size(block); }
  int64_t block_bytes() const { return padded * bytes * width; }
  int64_t panel_bytes() const { return padded * bytes * CHANNELS; }
};

// Rows of activations -> blocks of int8, their offsets and the inverse of their scales.
void quantize_block(const Call& c, int64_t block, char* blocks, int32_t* offsets, float* inverses) {
  thread_local Buffer buffer;
  const int rows = c.size(block), width = c.width_of(block);
  int8_t* values = static_cast<int8_t*>(buffer.get(rows * c.padded));
  offsets += block * c.groups * c.width;
  for (int i = 0; i < c.groups * width; ++i) offsets[i] = 0;
  for (int r = 0; r < rows; ++r) {
    int8_t* row = values + r * c.padded;
    const int64_t index = c.first(block) + r;
    inverses[index] = 1.0f / c.kernels->quantize(c.x + index * c.weights.k, c.weights.k, c.smallest, row);
    for (int64_t i = c.weights.k; i < c.padded; ++i) row[i] = 0;
    if (c.offset == 0) continue;
    const int64_t group = c.traits.group ? c.traits.group : c.padded;
    for (int g = 0; g < c.groups; ++g) {
      int32_t sum = 0;
      for (int64_t i = 0; i < group; ++i) sum += row[g * group + i];
      offsets[g * width + r] = c.offset * sum;
    }
  }
  c.kernels->pack(values, c.padded, rows, width, c.wide, blocks + block * c.block_bytes());
}

// All rows times `count` panels from `panel` on.
void multiply_panels(const Call& c, int64_t panel, int count, const char* blocks, const int32_t* offsets,
                     const float* inverses) {
  thread_local Buffer buffer;
  const int64_t scales_bytes = static_cast<int64_t>(c.groups) * CHANNELS * sizeof(float);
  char* memory = static_cast<char*>(buffer.get(count * (c.panel_bytes() + scales_bytes)));
  float* scales = reinterpret_cast<float*>(memory + count * c.panel_bytes());
  for (int p = 0; p < count; ++p)
    c.kernels->expand(c.weights, (panel + p) * CHANNELS, memory + p * c.panel_bytes(), scales + p * c.groups * CHANNELS);
  alignas(64) float out[MAX_ROWS * CHANNELS];
  for (int64_t b = 0; b < c.blocks; ++b) {
    for (int p = 0; p < count; ++p) {
      const Tile tile = {blocks + b * c.block_bytes(), memory + p * c.panel_bytes(), scales + p * c.groups * CHANNELS,
                         offsets + b * c.groups * c.width, out, c.size(b), c.width_of(b), c.groups, c.units};
      c.kernels->multiply[c.traits.width](tile);
      const int64_t channel = (panel + p) * CHANNELS;
      const int there = static_cast<int>(c.weights.channels - channel < CHANNELS ? c.weights.channels - channel : CHANNELS);
      for (int r = 0; r < tile.rows; ++r) {
        const int64_t row = c.first(b) + r;
        float* y = c.y + row * c.weights.channels + channel;
        for (int i = 0; i < there; ++i) y[i] = out[r * CHANNELS + i] * inverses[row];
        if (c.bias != nullptr)
          for (int i = 0; i < there; ++i) y[i] += c.bias[channel + i];
      }
    }
  }
}

void multiply(Call& c, int threads) {
  thread_local Buffer buffer;
  c.plan();
  const int64_t offsets_bytes = round_up(c.blocks * c.groups * c.width * sizeof(int32_t), 64);
  const int64_t inverses_bytes = round_up(c.rows * sizeof(float), 64);
  char* blocks = static_cast<char*>(buffer.get(offsets_bytes + inverses_bytes + c.blocks * c.block_bytes()));
  int32_t* offsets = reinterpret_cast<int32_t*>(blocks + c.blocks * c.block_bytes());
  float* inverses = reinterpret_cast<float*>(blocks + c.blocks * c.block_bytes() + offsets_bytes);
  // 64-byte blocks, so that what follows them is aligned.
  Pool& pool = Pool::get();
  pool.run(threads, static_cast<int>(c.blocks),
           [&](int block) { quantize_block(c, block, blocks, offsets, inverses); });

  const int64_t panels = (c.weights.channels + CHANNELS - 1) / CHANNELS;
  int64_t each = PANELS_BYTES / c.panel_bytes();
  each = each < 1 ? 1 : each > PANELS ? PANELS : each;
  while (each > 1 && panels / each < 4 * threads) --each;
  pool.run(threads, static_cast<int>((panels + each - 1) / each), [&](int task) {
    const int64_t panel = task * each;
    const int count = static_cast<int>(panels - panel < each ? panels - panel : each);
    multiply_panels(c, panel, count, blocks, offsets, inverses);
  });
}

}  // namespace
}  // namespace lowbit

extern "C" {

// y [rows, channels] = x [rows, k] times the stored weights, plus bias [channels] unless that is null. All row-major and
// dense; float32 except the weights. Returns 0, 1 for arguments that make no sense, 2 when memory is short.
PUBLIC int lowbit_multiply(int kernels, int format, const float* x, int64_t rows, int64_t k, const uint8_t* weights,
                           int64_t channels, const float* scale, int64_t scales, const float* bias, float smallest,
                           float* y, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  const bool scaled = format == TERNARY || format == INT8;
  if (chosen == nullptr || format < 0 || format >= FORMATS || rows < 0 || k < 1 || k > (1 << 16) || channels < 0 ||
      threads < 1 || !(smallest > 0) || (!scaled && k % 32 != 0) || (scaled && scales != 1 && scales != channels))
    return 1;
  if (rows == 0 || channels == 0) return 0;
  Call call = {};
  call.kernels = chosen->products;
  call.weights = {weights, scale, scales, channels, k, format};
  call.x = x;
  call.bias = bias;
  call.y = y;
  call.smallest = smallest;
  call.rows = rows;
  try {
    multiply(call, threads);
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}

}  // extern "C"
