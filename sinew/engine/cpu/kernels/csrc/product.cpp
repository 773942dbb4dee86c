// Products of layers that read the same rows, and the C interface that sinew/engine/cpu/library.py calls.
#include "buffer.h"
#include "kernels.h"
#include "pool.h"

namespace lowbit {
namespace {

constexpr int PANELS = 4;                    // that a task multiplies, at most: rows stay in the first cache meanwhile
constexpr int64_t PANELS_BYTES = 256 << 10;  // half of a second cache of 512 KiB
constexpr int MOST_LAYERS = 16;

struct Layer {
  Weights weights;
  const float* bias;
  float* y;
  int64_t panels() const { return (weights.channels + CHANNELS - 1) / CHANNELS; }
};

struct Call {
  const Kernels* kernels;
  const Layer* layers;
  int count;
  const float* x;
  float smallest;
  int64_t rows, k;
  int format;

  // Derived.
  Traits traits;
  int wide, unit, bytes, offset, groups, units, width;
  bool paired;
  int64_t padded, blocks;

  void plan() {
    traits = TRAITS[format];
    wide = traits.width >= EIGHT_BITS;
    unit = wide ? kernels->wide_unit : kernels->unit;
    bytes = unit == 2 ? 2 : 1;
    paired = traits.width == EIGHT_BITS && kernels->pairs != nullptr;
    offset = traits.offset + (wide ? kernels->wide_bias : 0);
    padded = round_up(k, 8);
    groups = traits.group ? static_cast<int>(k / traits.group) : 1;
    units = static_cast<int>((traits.group ? traits.group : padded) / unit);
    const int most = kernels->rows[traits.width];
    blocks = (rows + most - 1) / most;
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
  int64_t panel_bytes() const { return padded * CHANNELS; }
  int64_t group_bytes() const { return static_cast<int64_t>(groups) * CHANNELS * 4; }  // scales or bases of a panel
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
    inverses[index] = 1.0f / c.kernels->quantize(c.x + index * c.k, c.k, c.smallest, row);
    for (int64_t i = c.k; i < c.padded; ++i) row[i] = 0;
    if (c.offset == 0 && !c.paired) continue;
    const int64_t group = c.traits.group ? c.traits.group : c.padded;
    for (int g = 0; g < c.groups; ++g) {
      if (c.paired) {
        offsets[g * width + r] = c.kernels->pairs(row + g * group, group);
        continue;
      }
      int32_t sum = 0;
      for (int64_t i = 0; i < group; ++i) sum += row[g * group + i];
      offsets[g * width + r] = c.offset * sum;
    }
  }
  c.kernels->pack(values, c.padded, rows, width, c.wide, blocks + block * c.block_bytes());
}

// All rows times `count` panels of a layer, from `panel` on.
void multiply_panels(const Call& c, const Layer& layer, int64_t panel, int count, const char* blocks,
                     const int32_t* offsets, const float* inverses) {
  thread_local Buffer buffer;
  char* memory = static_cast<char*>(buffer.get(count * (c.panel_bytes() + 2 * c.group_bytes())));
  float* scales = reinterpret_cast<float*>(memory + count * c.panel_bytes());
  int32_t* bases = reinterpret_cast<int32_t*>(memory + count * (c.panel_bytes() + c.group_bytes()));
  const int each = c.groups * CHANNELS;
  for (int p = 0; p < count; ++p)
    c.kernels->expand(layer.weights, (panel + p) * CHANNELS, memory + p * c.panel_bytes(), scales + p * each,
                      bases + p * each);
  const char* panels = c.format != INT8_PANELS ? memory
                                               : reinterpret_cast<const char*>(layer.weights.data) + panel * c.panel_bytes();
  alignas(64) float out[2 * MAX_ROWS * CHANNELS];
  const auto multiply_two = c.groups == 1 ? c.kernels->multiply_two[c.traits.width] : nullptr;
  const int64_t channels = layer.weights.channels;
  // The weights behind these are wanted next, by this thread or another. Their rows are too short for hardware to
  // see a stream in them.
  const int64_t bytes = row_bytes(c.format, c.k), behind = (panel + count) * CHANNELS;
  const char* next = reinterpret_cast<const char*>(layer.weights.data) + behind * bytes;
  const int64_t left = (channels - behind) * bytes, most = count * CHANNELS * bytes;
  const int64_t wanted = left < 0 ? 0 : left < most ? left : most, slice = round_up(wanted / c.blocks + 1, 64);
  for (int64_t b = 0; b < c.blocks; ++b) {
    for (int64_t i = b * slice; i < wanted && i < (b + 1) * slice; i += 64) __builtin_prefetch(next + i, 0, 2);
    const int64_t row = c.first(b);
    for (int p = 0, together; p < count; p += together) {
      together = multiply_two != nullptr && p + 1 < count ? 2 : 1;
      const char* w = panels + p * c.panel_bytes();
      const Tile tile = {blocks + b * c.block_bytes(), w, w + c.panel_bytes(), scales + p * each,
                         offsets + b * c.groups * c.width, bases + p * each, out, c.size(b), c.width_of(b), c.groups,
                         c.units};
      (together == 2 ? multiply_two : c.kernels->multiply[c.traits.width])(tile);
      for (int i = 0; i < together; ++i) {
        const int64_t channel = (panel + p + i) * CHANNELS;
        const int there = static_cast<int>(channels - channel < CHANNELS ? channels - channel : CHANNELS);
        c.kernels->finish(out + i * MAX_ROWS * CHANNELS, tile.rows, there, inverses + row,
                          layer.bias == nullptr ? nullptr : layer.bias + channel, layer.y + row * channels + channel,
                          channels);
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
  Pool& pool = Pool::get();
  pool.run(threads, static_cast<int>(c.blocks),
           [&](int block) { quantize_block(c, block, blocks, offsets, inverses); });

  int64_t panels = 0;
  for (int i = 0; i < c.count; ++i) panels += c.layers[i].panels();
  int64_t each = PANELS_BYTES / c.panel_bytes();
  each = each < 1 ? 1 : each > PANELS ? PANELS : each;
  while (each > 1 && panels / each < 4 * threads) --each;
  int64_t ends[MOST_LAYERS];  // tasks of the layers up to here
  for (int i = 0; i < c.count; ++i) ends[i] = (i ? ends[i - 1] : 0) + (c.layers[i].panels() + each - 1) / each;
  pool.run(threads, static_cast<int>(ends[c.count - 1]), [&](int task) {
    int i = 0;
    while (task >= ends[i]) ++i;
    const Layer& layer = c.layers[i];
    const int64_t panel = (task - (i ? ends[i - 1] : 0)) * each, left = layer.panels() - panel;
    multiply_panels(c, layer, panel, static_cast<int>(left < each ? left : each), blocks, offsets, inverses);
  });
}

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(address));
}

}  // namespace
}  // namespace lowbit

extern "C" {

// y [rows, channels] = x [rows, k] times the stored weights, plus bias [channels], of `count` layers that read the same
// rows, which are rounded once. All row-major and dense; float32 except the weights. `layers`: of each, six numbers: the
// addresses of weights, scales and bias (0 for none), and y, then channels and how many scales there are. Returns 0,
// 1 for arguments that make no sense, 2 when memory is short.
PUBLIC int lowbit_multiply(int kernels, int format, const float* x, int64_t rows, int64_t k, float smallest,
                           const int64_t* layers, int count, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  const bool scaled = format == TERNARY || format == INT8 || format == INT8_PANELS;
  if (chosen == nullptr || format < 0 || format >= FORMATS || rows < 0 || k < 1 || k > (1 << 16) || threads < 1 ||
      !(smallest > 0) || (!scaled && k % 32 != 0) || count < 1 || count > MOST_LAYERS)
    return 1;
  if (format == INT8_PANELS && (!chosen->products->takes_panels() || k % 8 != 0)) return 1;
  Layer made[MOST_LAYERS];
  int64_t all = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t* at = layers + 6 * i;
    const int64_t channels = at[4], scales = at[5];
    if (channels < 0 || (scaled && scales != 1 && scales != channels)) return 1;
    if (format == INT8_PANELS && channels % CHANNELS != 0) return 1;
    made[i] = {{pointer<const uint8_t>(at[0]), pointer<const float>(at[1]), scales, channels, k, format},
               pointer<const float>(at[2]), pointer<float>(at[3])};
    all += channels;
  }
  if (rows == 0 || all == 0) return 0;
  Call call = {};
  call.kernels = chosen->products;
  call.layers = made;
  call.count = count;
  call.x = x;
  call.smallest = smallest;
  call.rows = rows;
  call.k = k;
  call.format = format;
  try {
    multiply(call, threads);
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}

}  // extern "C"
