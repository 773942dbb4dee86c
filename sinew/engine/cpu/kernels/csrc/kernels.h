// Products of int8 activations with low-bit weights: the arguments and results of kernels.
//
// One tile is up to `Kernels::rows` rows of activations times CHANNELS output channels, or times twice as many
// channels. Weights are read as the bundle stores them, row by row, and expanded to a panel of codes just before the
// multiplication. A panel serves all rows of activations, so expanding costs little with many rows, and no second copy
// of the weights is needed. With few rows, expanding would cost as much as the products. INT8_PANELS are therefore
// weights that were converted to panels once: unsigned codes in units of 4, as vpdpbusd multiplies them. INT8_FOURS and
// INT8_EIGHTS are the same with signed codes in units of 4 and 8, for sdot and smmla on ARM. BF16_PANELS are panels of
// bfloat16 weights, whose activations are not rounded to integers. Their unit is two bfloat16 values (Halves).
//
//   codes     w = code - offset, and sum(x * w) = sum(x * code) - offset * sum(x), exact in integers
//   unit      adjacent values of k: 4 (8 with i8mm), or 2 for products of 16 bits
//   panel     [k / unit][CHANNELS][unit] bytes, or 16-bit values if the unit is 2
//   block     activations [k / unit][rows][unit], in the same types
//   group     values of k that share a scale: 32 in Q4_0 and Q8_0, all values in the other formats
#pragma once
#include <cstdint>

namespace lowbit {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr int CHANNELS = 16;  // output channels of a panel
constexpr int MAX_ROWS = 32;  // the largest number of rows of a tile, over all kernels

// The numbers are part of the interface (sinew/engine/cpu/kernels/library.py). The formats from BF16_PANELS on have one
// layout of weights. They differ in the order and the rounding of sums (sinew/layers/stores/lowbit.py).
enum Format : int {
  TERNARY = 0,
  INT8 = 1,
  Q8_0 = 2,
  Q4_0 = 3,
  INT8_PANELS = 4,
  INT8_FOURS = 5,
  INT8_EIGHTS = 6,
  BF16_PANELS = 7,
  BF16_TILES = 8,
  BF16_FUSED = 9,
  BF16_ODD = 10,
  FORMATS = 11
};
constexpr bool of_panels(int format) { return format >= INT8_PANELS && format <= INT8_EIGHTS; }
constexpr bool of_halves(int format) { return format >= BF16_PANELS; }

// The number of products that can be summed in 16 bits before they are widened. Kernels without 16-bit sums ignore it.
enum Width : int { TWO_BITS, FOUR_BITS, EIGHT_BITS, EIGHT_BITS_IN_GROUPS, WIDTHS };

// The depth of kernels for ARM (Kernels::depth). A panel has 64 KiB of this depth, and two panels are half of Jetson Orin's
// second-level cache of 256 KiB.
constexpr int64_t ARM_DEPTH = 4 << 10;

struct Tile {
  const void* x;           // a block of activations
  const void* w;           // a panel of codes
  const void* w2;          // the next panel, for `multiply_two`
  const float* scales;     // [groups][CHANNELS]
  const int32_t* offsets;  // [groups][width]: the excess of a row's sum over the group; width is the width of the block
  const int32_t* bases;    // [groups][CHANNELS]: the excess of a channel's sum; only if `pairs` is set
  // [rows][CHANNELS]: sum over groups of scale * sum(x * w); the next panel's result begins MAX_ROWS rows later.
  float* out;
  int rows, width;         // width: number of rows of the block in memory
  int groups, units;       // units: number of units of a group
  int64_t apart;           // bytes between two tiles of rows of the block; for Tiles only
  bool more;               // add to the sums in `out`, which an earlier part of k left there
  bool part;               // leave the sums in `out` for a later part of k; for Kernels with a `depth` only
};

// A frame of bytes with lines `row_bytes` apart, and its float32 planes [3][height][width] in [0, 1]. Row y mixes the
// lines first[y] and second[y] with row_weights[y]. A value of a line is one colour of one pixel. A line has `values`
// values, which is 3 * width rounded up to a multiple of 8. Each value mixes a left and a right neighbour with
// column_weights [2][values], which are divided by 2^24.
//
// Four values read two pieces of 8 bytes at their two `starts` [values / 4][2]. picks [2][values][4] has for each value
// the index of its byte among these 16 bytes, three times, then 128 for no byte. `reach` is 16 if the two pieces are
// always 16 adjacent bytes, else 8. It is 0 if lines have fewer than 8 bytes.
//
// Other resizes make contiguous bytes, [height][width][3]. For OPENCV, row_weights [2][height] and the two
// column_weights of a value (the left weight in the low half of 32 bits) have 11 binary places, and a mixed line has 7
// of them. For CROP (TensorFlow), column_weights [values] and row_weights [height] are the weights of the second
// neighbours.
enum Mixed : int { PLANES, OPENCV, CROP };
struct Picture {
  const uint8_t* frame;
  int64_t row_bytes;
  const int32_t *first, *second;
  const void* row_weights;
  const int32_t* starts;
  const uint8_t* picks;
  const void* column_weights;
  int64_t height, width, values, reach;
  void* out;
  int64_t row, plane, mixed;
};

// One pass of a resize. Rows of pixels with three values are `row_bytes` apart. Their lines (axis 0) or columns (axis
// 1) become weighted sums of neighbours. The result `i` of `target` results is the sum of `taps` neighbours from
// first[i] on, times weights [target][taps], added in order. int32 weights have `bits` binary places, and bytes become
// bytes that are rounded and clamped to 0 .. 255. If `bits` is 0, weights and results are float32, and the input is
// bytes, or floats if `floats`. `to` is contiguous.
struct Resampling {
  const void* from;
  int64_t row_bytes, height, width;
  const int32_t* first;
  const void* weights;
  int64_t axis, target, taps, bits, floats;
  void* to;
};

constexpr int TOGETHER = 16;  // rows whose columns are computed together

// Return the bytes of memory for a call: transposed rows and their results, or lines that are shorter than a vector.
constexpr int64_t resample_bytes(const Resampling& r) {
  return r.axis == 0 ? 4 * TOGETHER * r.height * (3 * r.width < TOGETHER) : 12 * TOGETHER * (r.width + r.target);
}

// A frame of bytes with lines `row_bytes` apart, which is written as JPEG and read again, with steps of luma and chroma
// [2][8][8]. `inverses` are the inverses of the quantiser's steps, which are 8 times as large as in a file. `steps` are
// the dequantiser's steps. `out` is contiguous.
struct RoundTrip {
  const uint8_t* frame;
  int64_t row_bytes, height, width;
  const float* inverses;
  const int32_t* steps;
  uint8_t* out;
  // The distance of the lines in memory.
  constexpr int64_t stride() const { return round_up(width, 8 * TOGETHER); }
};

constexpr int64_t round_trip_bytes(const RoundTrip& r) { return 56 * r.stride() + 128; }

struct Kernels {
  const char* name;
  int rows[WIDTHS];  // the largest number of rows of a tile
  int even;        // 1 if blocks are padded to an even number of rows
  int unit;        // values of k in a unit, for codes of up to 4 bits
  int wide_unit;   // the same for codes of 8 bits; 2 means products of 16 bits
  int wide_bias;   // 128 or 0; added to 8-bit codes, which makes them unsigned
  void (*multiply[WIDTHS])(const Tile&);
  // Round a row of activations to int8, and return its scale. See quantize().
  float (*quantize)(const float* x, int64_t k, float smallest, int8_t* out);
  // Expand CHANNELS rows of stored weights to a panel of codes, their scales, and bases. See expand_panel().
  void (*expand)(const struct Weights&, int64_t channel, void* panel, float* scales, int32_t* bases);
  // Convert int8 [rows][k] to a block. See pack_block().
  void (*pack)(const int8_t* x, int64_t k, int rows, int width, int wide, void* block);
  // Write the result of a tile, [rows][CHANNELS], to rows of y that are `stride` apart, for the first `there` channels.
  // See finish().
  void (*finish)(const float* out, int rows, int there, const float* inverses, const float* bias, float* y,
                 int64_t stride);
  // See Picture. `memory` has room for three lines of `values`.
  void (*resize)(const Picture&, void* memory);
  // See Resampling. `memory` has resample_bytes().
  void (*resample)(const Resampling&, char* memory);
  // See RoundTrip. `memory` has round_trip_bytes().
  void (*jpeg)(const RoundTrip&, uint8_t* memory);
  // Return the term of a row of activations alone, if EIGHT_BITS makes two products with one multiplication
  // (x86_avx2.cpp). Otherwise null.
  int32_t (*pairs)(const int8_t* x, int64_t k);
  // Multiply two panels of one group each at once, so that a value of x is read once for both. Null if this is not
  // faster.
  void (*multiply_two[WIDTHS])(const Tile&);
  // The bytes of a row that a task multiplies at a time, if all of k has one scale. 0 for whole rows only.
  int64_t depth;
  // Return the format of weights whose panels are those of expanded 8-bit codes, or -1 if these codes have 16 bits.
  int panels() const { return wide_unit == 2 ? -1 : wide_unit == 8 ? INT8_EIGHTS : wide_bias ? INT8_PANELS : INT8_FOURS; }
};

// Products of bfloat16, added in float32 as sinew/layers/stores/lowbit.py defines. A panel is [k / 2][CHANNELS][2]. Blocks
// of activations are packed by the set's Kernels, in units of Kernels::wide_unit bytes.
struct Halves {
  int format;  // the order of sums: a format other than BF16_TILES
  int rows;    // the largest number of rows of a tile
  void (*round)(const float* x, int64_t k, int8_t* out);  // round to bfloat16 [k], to nearest even
  // The kernels use only x, w, w2, out, rows and units of a tile.
  void (*multiply)(const Tile&);
  void (*multiply_two)(const Tile&);  // null if this is not faster
  // Attention with products of bfloat16 (attend_halves.h). `memory` has attend_bytes() for `rows` rows. Null if the set
  // has no such attention.
  void (*attend)(const struct Attention&, int64_t batch, int64_t head, int64_t first, int64_t last, char* memory);
  int64_t depth;  // as in Kernels
};

// The last step of a tile: y = add + (sums * scale * inverse + bias) * gate, each operation rounded, in this order.
// Sums of bfloat16 have no scale and no inverse.
struct Ending {
  const void* sums;         // [panels][MAX_ROWS][CHANNELS], 4 bytes each
  const int32_t* offsets;   // [rows]
  const float* scales;      // [panels][CHANNELS]
  const float* inverses;    // [rows]
  const float *bias, *gate; // from the first channel on, or null
  const float* add;         // in the layout of y, or null
  float* y;                 // from the first row and channel on
  int64_t stride;           // distance between two rows of y
  int rows, there;          // there: number of channels
};

// Products with tile instructions (x86_amx.cpp). For int8, they replace Kernels::multiply if all of k has one scale and
// codes are unsigned in units of 4. Panels and offsets are those of Kernels, but blocks have another order. For
// bfloat16, they compute BF16_TILES.
//
// A product writes only the sums, to a tile's `out`. Between its steps it finishes the previous product, so that the
// vector units compute at the same time as the tile unit.
struct Tiles {
  const char* name;  // name of the instruction set with these products
  int rows;          // the largest number of rows of a tile
  void (*begin)();   // a thread calls begin() before it multiplies
  void (*end)();     // and end() after it
  void (*round)(const float* x, int64_t k, int8_t* out);  // as in Halves; null for products of int8
  int64_t (*block_bytes)(int64_t bytes, int rows);
  void (*pack)(const int8_t* x, int64_t bytes, int rows, void* block);  // [rows][bytes] -> block
  void (*multiply)(const Tile&, const Ending* before);  // before: the previous product, or null
  void (*multiply_two)(const Tile&, const Ending* before);
  void (*finish)(const Ending&);
  // As in Halves; null for products of int8.
  void (*attend)(const struct Attention&, int64_t batch, int64_t head, int64_t first, int64_t last, char* memory);
};

struct Weights {
  const uint8_t* data;  // rows as the bundle stores them
  const float* scale;   // [channels] or [1]; null if the rows contain scales
  int64_t scales;       // number of scales
  int64_t channels, k;
  int format;
};

// The properties of each format.
struct Traits {
  int width, offset, group;  // group: 0 means all of k
};
constexpr Traits TRAITS[FORMATS] = {
    {TWO_BITS, 1, 0}, {EIGHT_BITS, 0, 0}, {EIGHT_BITS_IN_GROUPS, 0, 32}, {FOUR_BITS, 8, 32}, {EIGHT_BITS, 0, 0},
    {EIGHT_BITS, 0, 0}, {EIGHT_BITS, 0, 0}, {EIGHT_BITS, 0, 0}, {EIGHT_BITS, 0, 0}, {EIGHT_BITS, 0, 0}, {EIGHT_BITS, 0, 0}};

constexpr int64_t row_bytes(int format, int64_t k) {
  return format == TERNARY                     ? round_up(k, 64) / 4
         : of_halves(format)                   ? 2 * k
         : format == INT8 || of_panels(format) ? k
                                               : k / 32 * (format == Q8_0 ? 34 : 18);
}

// Attention of float32 tensors whose heads are adjacent in a row: q [batch, queries, heads, size], k and v [batch,
// keys, key_heads, size], and out [batch, queries, heads, size]. `out` is contiguous. The other tensors have strides in
// values. The keys from index `before` on, and their values, are in own_k and own_v.
struct Attention {
  const float *q, *k, *v, *own_k, *own_v;
  const uint8_t* mask;  // [batch, queries, keys], 1 if a query attends to a key; or null
  float* out;
  int64_t batch, queries, keys, heads, key_heads, size;
  int64_t q_batch, q_row, k_batch, k_row, v_batch, v_row;
  int64_t before, own_k_batch, own_k_row, own_v_batch, own_v_row;
  float scale;

  const float* key(int64_t b, int64_t head, int64_t i) const {
    return (i < before ? k + b * k_batch + i * k_row : own_k + b * own_k_batch + (i - before) * own_k_row) + head * size;
  }
  const float* value(int64_t b, int64_t head, int64_t i) const {
    return (i < before ? v + b * v_batch + i * v_row : own_v + b * own_v_batch + (i - before) * own_v_row) + head * size;
  }
  // Queries that read the same key head are rows() rows of one matrix: all heads of the first query, then of the next
  // query.
  int64_t shared() const { return heads / key_heads; }
  int64_t rows() const { return queries * shared(); }
  const float* query(int64_t b, int64_t head, int64_t row) const {
    return q + b * q_batch + row / shared() * q_row + (head * shared() + row % shared()) * size;
  }
  float* result(int64_t b, int64_t head, int64_t row) const {
    return out + ((b * queries + row / shared()) * heads + head * shared() + row % shared()) * size;
  }
  const uint8_t* seen(int64_t b, int64_t row) const {
    return mask == nullptr ? nullptr : mask + (b * queries + row / shared()) * keys;
  }
};

// A norm of a row: (x - mean) / sqrt(variance + eps) if `centred` (LayerNorm), else x / sqrt(mean of squares + eps)
// (RMSNorm). The result is multiplied by weight [k] and bias [k] is added, if they are not null.
struct Norm {
  int centred;
  float eps;
  const float *weight, *bias;
};

// Operations between products (floats.h).
struct FloatKernels {
  int rows, tile;  // rows: number of rows that attention computes together; tile: rows of its smallest tile
  // Compute the rows `first` to `last` of a key head.
  void (*attend)(const Attention&, int64_t batch, int64_t head, int64_t first, int64_t last, char* memory);
  // The same with products that may be rounded to 16 bits. It is `attend` itself if rounding is not faster.
  void (*attend_rounded)(const Attention&, int64_t batch, int64_t head, int64_t first, int64_t last, char* memory);
  void (*gelu)(float* x, int64_t count);
  void (*silu_times)(float* gate, const float* up, int64_t count);
  void (*norm)(const float* x, int64_t k, const Norm& norm, float* out);
};

// Return the distance of two rows of floats in private memory, such as scores. It is never a multiple of 4 KiB, because
// such rows would share the same lines of a cache.
constexpr int64_t row_stride(int64_t values) { return round_up(values, 2 * CHANNELS) + CHANNELS; }

// Return the bytes of memory for one call of `attend`: keys, values, and `rows` rows of scores, queries and results.
constexpr int64_t attend_bytes(const Attention& a, int rows) {
  const int64_t padded = round_up(a.keys, 2 * CHANNELS), width = round_up(a.size, 2 * CHANNELS);
  return 4 * (2 * padded * width + rows * (row_stride(a.keys) + 2 * width));
}

// One instruction set, which dispatch.cpp chooses.
struct Set {
  const Kernels* products;
  const FloatKernels* floats;
  bool here;
  const Halves* halves;  // null if the set does not multiply bfloat16
  const Tiles* tiles;    // for int8; null if the set has no tiles
  const Tiles* half_tiles;  // for bfloat16; null if the set has no tiles
  const char* name() const { return tiles == nullptr ? products->name : tiles->name; }
  // Return the products of attention whose products may be rounded to 16 bits: an order of sums of bfloat16
  // (sinew/layers/stores/lowbit.py), integers (attend16.h), or floats that are not rounded.
  const char* attention() const {
    if (half_tiles != nullptr) return "bf16-tiles";
    if (halves != nullptr && halves->attend != nullptr) return "bf16-odd";
    return floats->attend_rounded == floats->attend ? "float32" : "int16";
  }
  bool takes(int format) const {
    if (format == BF16_TILES) return half_tiles != nullptr;
    return of_halves(format) ? halves != nullptr && halves->format == format : format == panels();
  }
  // Return the format of panels of int8 weights that the set multiplies, or -1.
  int panels() const { return tiles != nullptr ? INT8_PANELS : products->panels(); }
};

const Set* set_here(int index);  // the index-th set that this CPU supports, best first; null after the last set

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512vnni_kernels();
const Halves* avx512bf16_halves();
const Tiles* amx_tiles(const char** why);  // null if this process has no tiles; `why` has the reason if the CPU has tiles
const Tiles* amx_half_tiles();             // for bfloat16 on the same CPU
const Kernels* neon_dotprod_kernels();
const Kernels* neon_i8mm_kernels();
const Halves* neon_fmla_halves();
const Halves* neon_bf16_halves();
const FloatKernels* portable_floats();
const FloatKernels* avx2_floats();
const FloatKernels* avx512_floats();
const FloatKernels* neon_floats();

}  // namespace lowbit
