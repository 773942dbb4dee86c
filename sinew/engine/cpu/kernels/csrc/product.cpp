// Products of layers that read the same rows, and the C interface that sinew/engine/cpu/kernels/library.py calls.
#include <cstring>

#include "buffer.h"
#include "kernels.h"
#include "pool.h"
#include "product.h"

namespace lowbit {
namespace {

// A task multiplies at most this many panels, so that the rows of activations stay in the first-level cache. With
// 16-bit panels, a task multiplies one panel, which stays in that cache itself.
constexpr int PANELS = 4;
#if defined(__aarch64__)
constexpr int64_t PANELS_BYTES = 128 << 10;  // half of Jetson Orin's second-level cache of 256 KiB. Graviton has 1 or 2 MiB
#else
constexpr int64_t PANELS_BYTES = 256 << 10;  // half of a second-level cache of 512 KiB
#endif
// The same for tiles, on CPUs with a second-level cache of 2 MiB. A task multiplies this many bytes of k of its panels at
// a time, with all rows, so that these 768 KiB stay in that cache while longer rows of activations pass through it.
constexpr int TILES_PANELS = 8;
constexpr int64_t TILES_DEPTH = 6 << 10;
constexpr int64_t SUMS = 2 * MAX_ROWS * CHANNELS;  // of two panels

struct Plan : Call {
  const Kernels* kernels;
  const Halves* halves;  // multiplies in place of kernels; else null
  const Tiles* tiles;    // multiplies in place of kernels; else null
  void (*round)(const float* x, int64_t k, int8_t* out);  // rounds a row to bfloat16; null if rows become int8
  Traits traits;
  int wide, unit, bytes, offset, groups, units, width;
  bool paired, even;
  int64_t padded, blocks;  // padded: bytes of a row of activations after padding to whole units
  int64_t parts, depth;    // number of parts of k that are multiplied one after the other, and their bytes
  void (*one)(const Tile&);  // null for tiles
  void (*two)(const Tile&);  // or null

  explicit Plan(const Call& call) : Call(call), kernels(call.set->products) {
    halves = of_halves(format) && format != BF16_TILES ? call.set->halves : nullptr;
    traits = TRAITS[format];
    wide = traits.width >= EIGHT_BITS;
    const bool in_fours = format == INT8_PANELS || (wide ? kernels->panels() == INT8_PANELS : kernels->unit == 4);
    tiles = format == BF16_TILES                   ? call.set->half_tiles
            : !halves && !traits.group && in_fours ? call.set->tiles
                                                   : nullptr;
    round = halves ? halves->round : tiles ? tiles->round : nullptr;
    unit = tiles ? 4 : wide ? kernels->wide_unit : kernels->unit;
    bytes = unit == 2 ? 2 : 1;
    paired = traits.width == EIGHT_BITS && kernels->pairs != nullptr && !tiles;
    const int bias = format == INT8_PANELS ? 128 : kernels->wide_bias;
    offset = traits.offset + (wide ? bias : 0);
    padded = round_up(k, 8) * (round ? 2 : 1);
    groups = traits.group ? static_cast<int>(k / traits.group) : 1;
    units = static_cast<int>((traits.group ? traits.group : padded) / unit);
    one = halves ? halves->multiply : kernels->multiply[traits.width];
    two = halves ? halves->multiply_two : groups == 1 ? kernels->multiply_two[traits.width] : nullptr;
    const int most = halves ? halves->rows : tiles ? tiles->rows : kernels->rows[traits.width];
    blocks = (rows + most - 1) / most;
    width = static_cast<int>((rows + blocks - 1) / blocks);
    even = kernels->even && !tiles;
    if (even) width = static_cast<int>(round_up(width, 2));
    if (tiles && blocks > 1) width = most;
    const int64_t deepest = tiles ? TILES_DEPTH : halves ? halves->depth : groups == 1 ? kernels->depth : 0;
    parts = deepest ? (padded + deepest - 1) / deepest : 1;
    depth = round_up((padded + parts - 1) / parts, 64);
  }
  // The sizes of blocks differ by at most one row, because a small last block would leave most of the multipliers idle.
  // A block of tiles is full, except for the last block, because a tile with few rows takes as long as a full tile.
  int64_t first(int64_t block) const {
    if (tiles) return block * width < rows ? block * width : rows;
    const int64_t more = rows % blocks;
    return rows / blocks * block + (block < more ? block : more);
  }
  int size(int64_t block) const { return static_cast<int>(first(block + 1) - first(block)); }
  int width_of(int64_t block) const { return even ? static_cast<int>(round_up(size(block), 2)) : size(block); }
  int64_t block_bytes() const { return tiles ? tiles->block_bytes(padded, width) : padded * bytes * width; }
  int64_t panel_bytes() const { return padded * bytes * CHANNELS; }
  int64_t group_bytes() const { return static_cast<int64_t>(groups) * CHANNELS * 4; }  // bytes of a panel's scales or bases
};

// Return the row of activations at `index`, before rounding. An action writes its result to `memory` [k].
const float* row_of(const Plan& c, int64_t index, float* memory) {
  const float* x = c.x + index * c.apart();
  const FloatKernels* floats = c.set->floats;
  if (c.action == AS_IS) return x;
  if (c.action == NORMED) {
    floats->norm(x, c.k, c.norm, memory);
    return memory;
  }
  std::memcpy(memory, x, c.k * sizeof(float));
  if (c.action == SILU_TIMES) {
    floats->silu_times(memory, c.up + index * c.apart(), c.k);
    return memory;
  }
  floats->gelu(memory, c.k);
  if (c.action == GELU_TIMES) {
    const float* up = c.up + index * c.apart();
    for (int64_t i = 0; i < c.k; ++i) memory[i] *= up[i];
  }
  return memory;
}

// Convert rows of activations to blocks of int8, with their offsets and the inverses of their scales.
void quantize_block(const Plan& c, int64_t block, char* blocks, int32_t* offsets, float* inverses) {
  thread_local Buffer buffer;
  const int rows = c.size(block), width = c.width_of(block);
  float* memory = static_cast<float*>(buffer.get(round_up(c.k, 16) * sizeof(float) + rows * c.padded));
  int8_t* values = reinterpret_cast<int8_t*>(memory + round_up(c.k, 16));
  offsets += block * c.groups * c.width;
  for (int i = 0; i < c.groups * width; ++i) offsets[i] = 0;
  for (int r = 0; r < rows; ++r) {
    int8_t* row = values + r * c.padded;
    const int64_t index = c.first(block) + r;
    if (c.round) {
      inverses[index] = 1.0f;
      c.round(row_of(c, index, memory), c.k, row);
      continue;
    }
    inverses[index] = 1.0f / c.kernels->quantize(row_of(c, index, memory), c.k, c.smallest, row);
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
  char* to = blocks + block * c.block_bytes();
  if (c.tiles)
    c.tiles->pack(values, c.padded, rows, to);
  else
    c.kernels->pack(values, c.padded, rows, width, c.wide, to);
}

// Compute y = add + y * gate for a finished tile: two roundings, in this order.
void join(const Layer& layer, int64_t row, int rows, int64_t channel, int there) {
  for (int r = 0; r < rows; ++r) {
    float* y = layer.y + (row + r) * layer.apart() + channel;
    if (layer.gate != nullptr)
      for (int i = 0; i < there; ++i) y[i] *= layer.gate[channel + i];
    if (layer.add == nullptr) continue;
    const float* add = layer.add + (row + r) * layer.apart() + channel;
    for (int i = 0; i < there; ++i) y[i] = add[i] + y[i];
  }
}

// Multiply all rows by `count` panels of a layer, from `panel` on, with tiles. The panels' codes begin at `panels`, and
// `sums` has room for two results, or for all results if k has several parts.
void multiply_tiles(const Plan& c, const Layer& layer, int64_t panel, int count, const char* panels, const char* blocks,
                    const int32_t* offsets, const float* scales, const float* inverses, float* sums) {
  Ending ending;
  const Ending* before = nullptr;  // the previous product, if its sums are complete but not finished
  const auto from = [](const float* all, int64_t first) { return all == nullptr ? nullptr : all + first; };
  int64_t turn = 0;
  c.tiles->begin();
  for (int64_t part = 0; part < c.parts; ++part) {
    // Before a byte of k, a panel and a tile of rows have 16 bytes.
    const int64_t first = part * c.depth, skipped = CHANNELS * first, depth = c.padded - first < c.depth ? c.padded - first : c.depth;
    turn = 0;
    for (int64_t b = 0; b < c.blocks; ++b) {
      const int64_t row = c.first(b);
      for (int p = 0, together; p < count; p += together, ++turn) {
        together = p + 1 < count ? 2 : 1;
        const char* w = panels + p * c.panel_bytes() + skipped;
        float* out = sums + (c.parts > 1 ? turn : turn % 2) * SUMS;
        const Tile tile = {blocks + b * c.block_bytes() + skipped, w, w + c.panel_bytes(), scales + p * CHANNELS,
                           offsets + b * c.width, nullptr, out, c.size(b), c.width_of(b), 1, static_cast<int>(depth / c.unit),
                           CHANNELS * round_up(c.padded, 64), part > 0};
        (together == 2 ? c.tiles->multiply_two : c.tiles->multiply)(tile, before);
        if (part + 1 < c.parts) continue;
        const int64_t channel = (panel + p) * CHANNELS, at = row * layer.apart() + channel, more = layer.weights.channels - channel;
        ending = {out, tile.offsets, tile.scales, inverses + row, from(layer.bias, channel), from(layer.gate, channel),
                  from(layer.add, at), layer.y + at, layer.apart(), tile.rows,
                  static_cast<int>(more < together * CHANNELS ? more : together * CHANNELS)};
        before = &ending;
      }
    }
  }
  c.tiles->finish(ending);
  c.tiles->end();
}

// Multiply all rows by `count` panels of a layer, from `panel` on.
void multiply_panels(const Plan& c, const Layer& layer, int64_t panel, int count, const char* blocks,
                     const int32_t* offsets, const float* inverses) {
  thread_local Buffer buffer;
  const int64_t results = c.parts > 1 ? c.blocks * ((count + 1) / 2) : c.tiles ? 2 : 0;
  const int64_t expanded = count * (c.panel_bytes() + 2 * c.group_bytes()), sums_bytes = results * SUMS * sizeof(float);
  char* memory = static_cast<char*>(buffer.get(sums_bytes + expanded)) + sums_bytes;
  float* scales = reinterpret_cast<float*>(memory + count * c.panel_bytes());
  int32_t* bases = reinterpret_cast<int32_t*>(memory + count * (c.panel_bytes() + c.group_bytes()));
  const int each = c.groups * CHANNELS;
  const bool laid = of_panels(c.format) || c.round;
  for (int p = 0; p < count && !c.round; ++p)
    c.kernels->expand(layer.weights, (panel + p) * CHANNELS, memory + p * c.panel_bytes(), scales + p * each,
                      bases + p * each);
  const char* panels = laid ? reinterpret_cast<const char*>(layer.weights.data) + panel * c.panel_bytes() : memory;
  float* const sums = reinterpret_cast<float*>(memory - sums_bytes);
  if (c.tiles) return multiply_tiles(c, layer, panel, count, panels, blocks, offsets, scales, inverses, sums);
  alignas(64) float out[SUMS];
  const int64_t channels = layer.weights.channels;
  // Prefetch the weights of the following panels, which this or another thread reads next. Their rows are too short for
  // the prefetcher of the CPU, unless k has several parts. Tiles are slower with a prefetch
  // (research/log/2026-11-29.md).
  const int64_t bytes = row_bytes(c.format, c.k), behind = (panel + count) * CHANNELS;
  const char* next = reinterpret_cast<const char*>(layer.weights.data) + behind * bytes;
  const int64_t left = (channels - behind) * bytes, most = count * CHANNELS * bytes;
  const int64_t wanted = left < 0 ? 0 : left < most ? left : most, slice = round_up(wanted / c.blocks + 1, 64);
  for (int64_t part = 0; part < c.parts; ++part) {
    const int64_t skipped = part * c.depth, depth = c.padded - skipped < c.depth ? c.padded - skipped : c.depth;
    const int units = c.parts > 1 ? static_cast<int>(depth / c.unit) : c.units;
    for (int64_t b = 0; b < c.blocks; ++b) {
      for (int64_t i = b * slice; c.parts == 1 && i < wanted && i < (b + 1) * slice; i += 64) __builtin_prefetch(next + i, 0, 2);
      const int64_t row = c.first(b);
      for (int p = 0, together; p < count; p += together) {
        together = c.two != nullptr && p + 1 < count ? 2 : 1;
        const char* w = panels + p * c.panel_bytes() + skipped * c.bytes * CHANNELS;
        float* const to = c.parts > 1 ? sums + (b * count + p) * c.width * CHANNELS : out;
        const Tile tile = {blocks + b * c.block_bytes() + skipped * c.bytes * c.width_of(b), w, w + c.panel_bytes(), scales + p * each,
                           offsets + b * c.groups * c.width, bases + p * each, to, c.size(b), c.width_of(b), c.groups,
                           units, 0, part > 0, part + 1 < c.parts};
        (together == 2 ? c.two : c.one)(tile);
        if (tile.part) continue;
        for (int i = 0; i < together; ++i) {
          const int64_t channel = (panel + p + i) * CHANNELS;
          const int there = static_cast<int>(channels - channel < CHANNELS ? channels - channel : CHANNELS);
          c.kernels->finish(to + i * MAX_ROWS * CHANNELS, tile.rows, there, inverses + row,
                            layer.bias == nullptr ? nullptr : layer.bias + channel, layer.y + row * layer.apart() + channel,
                            layer.apart());
          if (layer.gate != nullptr || layer.add != nullptr) join(layer, row, tile.rows, channel, there);
        }
      }
    }
  }
}

}  // namespace

void multiply(const Call& call, int threads) {
  thread_local Buffer buffer;
  const Plan c(call);
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
  int64_t each = c.bytes == 2 ? 1 : PANELS_BYTES / (c.parts > 1 ? c.depth * c.bytes * CHANNELS : c.panel_bytes());
  each = c.tiles ? TILES_PANELS : each < 1 ? 1 : each > PANELS ? PANELS : each;
  while (each > 1 && panels / each < 4 * threads) --each;
  if (c.tiles && each > 1) each -= each % 2;  // a panel alone needs three loads for two products
  int64_t ends[MOST_LAYERS];  // number of tasks of the layers up to this one
  for (int i = 0; i < c.count; ++i) ends[i] = (i ? ends[i - 1] : 0) + (c.layers[i].panels() + each - 1) / each;
  pool.run(threads, static_cast<int>(ends[c.count - 1]), [&](int task) {
    int i = 0;
    while (task >= ends[i]) ++i;
    const Layer& layer = c.layers[i];
    const int64_t panel = (task - (i ? ends[i - 1] : 0)) * each, left = layer.panels() - panel;
    multiply_panels(c, layer, panel, static_cast<int>(left < each ? left : each), blocks, offsets, inverses);
  });
}

bool fits(const Call& c, int threads) {
  const bool scaled = c.format == TERNARY || c.format == INT8 || of_panels(c.format);
  const bool laid = of_panels(c.format) || of_halves(c.format);
  if (c.set == nullptr || c.format < 0 || c.format >= FORMATS || c.rows < 0 || c.k < 1 || c.k > (1 << 16) || threads < 1 ||
      !(c.smallest > 0) || (!scaled && !laid && c.k % 32 != 0) || c.count < 1 || c.count > MOST_LAYERS || c.action < 0 ||
      c.action >= ACTIONS)
    return false;
  if (laid && (!c.set->takes(c.format) || c.k % 8 != 0)) return false;
  for (int i = 0; i < c.count; ++i) {
    const Weights& w = c.layers[i].weights;
    if (w.channels < 0 || (scaled && w.scales != 1 && w.scales != w.channels)) return false;
    if (laid && w.channels % CHANNELS != 0) return false;
  }
  return true;
}

}  // namespace lowbit

extern "C" {

// Compute y [rows, channels] = x [rows, k] times the stored weights, plus bias [channels], for `count` layers that read
// the same rows. The rows are rounded once. All arrays are row-major and contiguous, and float32 except the weights.
// `layers` has six numbers per layer: the addresses of weights, scales, bias (0 for none) and y, the number of channels
// and the number of scales. Return 0, 1 for invalid arguments, or 2 without enough memory.
PUBLIC int lowbit_multiply(int kernels, int format, const float* x, int64_t rows, int64_t k, float smallest,
                           const int64_t* layers, int count, int threads) {
  using namespace lowbit;
  if (count < 1 || count > MOST_LAYERS) return 1;
  Layer made[MOST_LAYERS] = {};
  int64_t all = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t* at = layers + 6 * i;
    made[i].weights = {reinterpret_cast<const uint8_t*>(at[0]), reinterpret_cast<const float*>(at[1]), at[5], at[4], k, format};
    made[i].bias = reinterpret_cast<const float*>(at[2]);
    made[i].y = reinterpret_cast<float*>(at[3]);
    all += at[4];
  }
  Call call = {};
  call.set = set_here(kernels);
  call.layers = made;
  call.count = count;
  call.x = x;
  call.smallest = smallest;
  call.rows = rows;
  call.k = k;
  call.format = format;
  if (!fits(call, threads)) return 1;
  if (rows == 0 || all == 0) return 0;
  try {
    multiply(call, threads);
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}

// Resize a frame (see Picture in kernels.h). `sizes` has row_bytes, height, width, reach, row, plane and mixed. Return
// values as in lowbit_multiply.
PUBLIC int lowbit_resize(int kernels, const uint8_t* frame, const int32_t* lines, const void* row_weights,
                         const int32_t* starts, const uint8_t* picks, const void* column_weights, const int64_t* sizes,
                         void* out) {
  using namespace lowbit;
  thread_local Buffer buffer;
  const Set* chosen = set_here(kernels);
  const int64_t height = sizes[1], width = sizes[2], values = round_up(3 * width, 8);
  if (chosen == nullptr || height < 1 || width < 1 || width > (1 << 20)) return 1;
  const Picture picture = {frame, sizes[0], lines, lines + height, row_weights, starts, picks, column_weights,
                           height, width, values, sizes[3], out, sizes[4], sizes[5], sizes[6]};
  try {
    chosen->products->resize(picture, buffer.get(3 * values * sizeof(float)));
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}

// Compute one pass of a resize (see Resampling in kernels.h). `sizes` has row_bytes, height, width, axis, target, taps,
// bits and floats. Return values as in lowbit_multiply.
PUBLIC int lowbit_resample(int kernels, const void* from, const int32_t* first, const void* weights, const int64_t* sizes,
                           void* to) {
  using namespace lowbit;
  thread_local Buffer buffer;
  const Set* chosen = set_here(kernels);
  const Resampling r = {from, sizes[0], sizes[1], sizes[2], first, weights, sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], to};
  const int64_t most = 1 << 20;
  if (chosen == nullptr || r.height < 1 || r.width < 1 || r.height > most || r.width > most || r.target < 1 || r.target > most ||
      r.taps < 1 || r.taps > (r.axis ? r.width : r.height))
    return 1;
  try {
    chosen->products->resample(r, static_cast<char*>(buffer.get(resample_bytes(r))));
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}

// Compute a JPEG round trip (see RoundTrip in kernels.h). `sizes` has row_bytes, height and width. Return values as in
// lowbit_multiply.
PUBLIC int lowbit_jpeg(int kernels, const uint8_t* frame, const float* inverses, const int32_t* steps, uint8_t* out,
                       const int64_t* sizes) {
  using namespace lowbit;
  thread_local Buffer buffer;
  const Set* chosen = set_here(kernels);
  const RoundTrip r = {frame, sizes[0], sizes[1], sizes[2], inverses, steps, out};
  if (chosen == nullptr || r.height < 1 || r.width < 1 || r.height > (1 << 20) || r.width > (1 << 20)) return 1;
  try {
    chosen->products->jpeg(r, static_cast<uint8_t*>(buffer.get(round_trip_bytes(r))));
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}

// Convert rows of int8 [channels, k] to a format of panels. Return 1 if a size does not divide, or if the kernels do not
// multiply this format.
PUBLIC int lowbit_lay_out(int kernels, int format, const uint8_t* rows, uint8_t* panels, int64_t channels, int64_t k, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  if (chosen == nullptr || !of_panels(format) || !chosen->takes(format) || channels < 0 || channels % CHANNELS != 0 || k < 1 ||
      k > (1 << 16) || k % 8 != 0 || threads < 1)
    return 1;
  const float none = 0;
  const Weights weights = {rows, &none, 1, channels, k, INT8};
  Pool::get().run(threads, static_cast<int>(channels / CHANNELS), [&](int panel) {
    float scales[CHANNELS];
    int32_t bases[CHANNELS];
    uint8_t* to = panels + panel * CHANNELS * k;
    chosen->products->expand(weights, static_cast<int64_t>(panel) * CHANNELS, to, scales, bases);
    for (int64_t i = 0; i < CHANNELS * k && chosen->products->panels() != format; ++i) to[i] ^= 128;
  });
  return 0;
}

}  // extern "C"
