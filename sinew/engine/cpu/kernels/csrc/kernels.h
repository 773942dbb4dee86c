// Products of int8 activations with low-bit weights: what a kernel is given, and what it gives.
//
// One tile is up to `Kernels::rows` rows of activations times CHANNELS output channels, or twice as many. Weights are read
// as the bundle stores them, row by row, and expanded to a panel of codes just before they are multiplied: a panel serves
// all rows of activations, so expanding costs little where they are many, and no second copy of the weights is ever made.
// Where they are few it would cost as much as the products: INT8_PANELS are weights that were laid out as panels once, as
// BF16_PANELS are, which no activation is rounded to integers for: a unit is two values in bfloat16 (Halves).
//
//   codes     w = code - offset, and sum(x * w) = sum(x * code) - offset * sum(x): integers, exact.
//   unit      values of k that lie together: 4 (8 with i8mm), or 2 where products are of 16 bits.
//   panel     [k / unit][CHANNELS][unit], bytes; where a unit is 2, of 16 bits each
//   block     of activations: [k / unit][rows][unit], the same
//   group     values of k that share a scale: 32 in Q4_0 and Q8_0, all of them in the other formats.
#pragma once
#include <cstdint>

namespace lowbit {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr int CHANNELS = 16;  // of a panel
constexpr int MAX_ROWS = 32;  // of a tile, over all kernels

// The numbers are part of the interface (sinew/engine/cpu/kernels/library.py).
// BF16_TILES are weights that lie as BF16_PANELS, and are added in the order of tiles (tiles.h).
enum Format : int { TERNARY = 0, INT8 = 1, Q8_0 = 2, Q4_0 = 3, INT8_PANELS = 4, BF16_PANELS = 5, BF16_TILES = 6, FORMATS = 7 };
constexpr bool of_halves(int format) { return format == BF16_PANELS || format == BF16_TILES; }

// How far sums of products may go in 16 bits before they are widened; kernels without such sums ignore it.
enum Width : int { TWO_BITS, FOUR_BITS, EIGHT_BITS, EIGHT_BITS_IN_GROUPS, WIDTHS };

struct Tile {
  const void* x;           // block of activations
  const void* w;           // panel of codes
  const void* w2;          // the next one, of `multiply_two`
  const float* scales;     // [groups][CHANNELS]
  const int32_t* offsets;  // [groups][width]: what a row's sum over the group has too much; width is the block's
  const int32_t* bases;    // [groups][CHANNELS]: what a channel's has too much; only where `pairs` is
  float* out;              // [rows][CHANNELS]: sum over groups of scale * sum(x * w); MAX_ROWS rows on, the next panel's
  int rows, width;         // width: rows of the block as it lies in memory
  int groups, units;       // units of a group
};

// A frame of bytes, its lines `row_bytes` apart, and its float32 planes [3][height][width] in [0, 1]. Row y mixes lines
// first[y] and second[y], weighed with row_weights[y]. Within a line a value is one colour of one pixel; there are `values`, 3 *
// width and up to a multiple of 8, and each mixes a left and a right neighbour with column_weights [2][values], which are divided
// by 2^24. Four values read two pieces of 8 bytes at their two `starts` [values / 4][2]: picks [2][values][4] says which byte of
// the 16, three times, then 128, which is no byte. `reach`: 16 where all pairs of pieces are 16 bytes in a row, else 8; 0
// where lines have not 8.
//
// Others make bytes, [height][width][3] and dense. OpenCV's: row_weights [2][height] and both column_weights of a value, the left
// one in the low half of 32 bits, have 11 binary places, and a line keeps 7 of them. TensorFlow's, of crops: column_weights [values]
// and row_weights [height] are those of the second neighbours.
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

// Pixels of three values, rows of them `row_bytes` apart, whose lines (axis 0) or columns (axis 1) become weighted sums of neighbours:
// the at-th of `target` is of the `taps` from first[at] on, weighed with weights [target][taps], added one after another from the
// first. int32 weights have `bits` binary places, and bytes become bytes: rounded, and cut to 0 .. 255. Where `bits` is 0 they are
// float32, and so is what comes out; what is read are bytes or `floats`. `to` is dense.
struct Resampling {
  const void* from;
  int64_t row_bytes, height, width;
  const int32_t* first;
  const void* weights;
  int64_t axis, target, taps, bits, floats;
  void* to;
};

constexpr int TOGETHER = 16;  // rows whose columns are weighed together

// Bytes that a call works in: rows turned to columns and what becomes of them, or lines of less than a vector.
constexpr int64_t resample_bytes(const Resampling& r) {
  return r.axis == 0 ? 4 * TOGETHER * r.height * (3 * r.width < TOGETHER) : 12 * TOGETHER * (r.width + r.target);
}

// A frame of bytes, its lines `row_bytes` apart, written as JPEG and read again, by steps of luma and chroma [2][8][8]: the inverses of
// the quantiser's, which are 8 times as large as in a file, and the dequantiser's. `out` is dense.
struct RoundTrip {
  const uint8_t* frame;
  int64_t row_bytes, height, width;
  const float* inverses;
  const int32_t* steps;
  uint8_t* out;
  constexpr int64_t stride() const { return round_up(width, 8 * TOGETHER); }  // of the lines it works in
};

constexpr int64_t round_trip_bytes(const RoundTrip& r) { return 56 * r.stride() + 128; }

struct Kernels {
  const char* name;
  int rows[WIDTHS];  // the most rows of a tile
  int even;        // 1 where blocks are padded to an even number of rows
  int unit;        // values of k in a unit, of codes up to 4 bits
  int wide_unit;   // the same for 8 bits; 2 means that products are of 16 bits
  int wide_bias;   // added to 8-bit codes, which makes them unsigned: 128 or 0
  void (*multiply[WIDTHS])(const Tile&);
  // Row of activations -> int8, its sums per group of 32 (or of all), and its scale. See activations().
  float (*quantize)(const float* x, int64_t k, float smallest, int8_t* out);
  // CHANNELS rows of stored weights -> panel of codes, their scales, and bases. See expand_panel().
  void (*expand)(const struct Weights&, int64_t channel, void* panel, float* scales, int32_t* bases);
  // int8 [rows][k] -> block. See pack_block().
  void (*pack)(const int8_t* x, int64_t k, int rows, int width, int wide, void* block);
  // Result of a tile [rows][CHANNELS] -> rows of y that are `stride` apart, their first `there` channels. See finish().
  void (*finish)(const float* out, int rows, int there, const float* inverses, const float* bias, float* y,
                 int64_t stride);
  // See Picture; memory: three lines of `values`.
  void (*resize)(const Picture&, void* memory);
  // See Resampling; memory: resample_bytes().
  void (*resample)(const Resampling&, char* memory);
  // See RoundTrip; memory: round_trip_bytes().
  void (*jpeg)(const RoundTrip&, uint8_t* memory);
  // What a row of activations contributes alone where EIGHT_BITS makes two products of one (x86_avx2.cpp), else null.
  int32_t (*pairs)(const int8_t* x, int64_t k);
  // Two panels at once, of one group each: a value of x is read once for both. Null where that gains nothing.
  void (*multiply_two[WIDTHS])(const Tile&);
  // True where a panel of 8-bit codes is what INT8_PANELS holds: [k / 4][CHANNELS][4], codes plus 128.
  bool takes_panels() const { return wide_unit == 4 && wide_bias == 128; }
};

// Products of bfloat16, added in float32 as sinew/layers/stores/lowbit.py says. A panel is [k / 2][CHANNELS][2].
struct Halves {
  int rows;  // the most rows of a tile
  void (*round)(const float* x, int64_t k, int8_t* out);  // to nearest even, bfloat16 [k]
  // Of a tile's x, w, w2, out, rows and units alone.
  void (*multiply)(const Tile&);
  void (*multiply_two)(const Tile&);
};

// What becomes of a tile's sums: y = add + (sums * scale * inverse + bias) * gate, each step rounded, in this order. Sums of
// bfloat16 have neither scale nor inverse.
struct Ending {
  const void* sums;         // [panels][MAX_ROWS][CHANNELS], of 4 bytes
  const int32_t* offsets;   // [rows]
  const float* scales;      // [panels][CHANNELS]
  const float* inverses;    // [rows]
  const float *bias, *gate; // of the first channel on; or null
  const float* add;         // as y; or null
  float* y;                 // of the first row and channel on
  int64_t stride;           // from one row of y to the next
  int rows, there;          // there: channels
};

// Products by tiles (x86_amx.cpp). Those of int8 replace Kernels::multiply where all of k has one scale and codes are unsigned, in
// units of 4. Panels and offsets are those of Kernels. Blocks lie in another order. Those of bfloat16 compute BF16_TILES.
// A product leaves its sums, of all of a tile's out. Between its own steps it finishes those of the product before: vectors
// compute while tiles do.
struct Tiles {
  const char* name;  // of the set that has them
  int rows;          // the most rows of a tile
  void (*begin)();   // a thread calls it before it multiplies,
  void (*end)();     // and this one behind
  void (*round)(const float* x, int64_t k, int8_t* out);  // as Halves has it; null where products are of int8
  int64_t (*block_bytes)(int64_t bytes, int rows);
  void (*pack)(const int8_t* x, int64_t bytes, int rows, void* block);  // [rows][bytes] -> block
  void (*multiply)(const Tile&, const Ending* before);  // before: or null
  void (*multiply_two)(const Tile&, const Ending* before);
  void (*finish)(const Ending&);
};

struct Weights {
  const uint8_t* data;  // rows as the bundle stores them
  const float* scale;   // [channels] or [1]; null where the rows hold scales
  int64_t scales;       // how many
  int64_t channels, k;
  int format;
};

// What a format is, in one place.
struct Traits {
  int width, offset, group;  // group: 0 means all of k
};
constexpr Traits TRAITS[FORMATS] = {
    {TWO_BITS, 1, 0}, {EIGHT_BITS, 0, 0}, {EIGHT_BITS_IN_GROUPS, 0, 32}, {FOUR_BITS, 8, 32}, {EIGHT_BITS, 0, 0},
    {EIGHT_BITS, 0, 0}, {EIGHT_BITS, 0, 0}};

constexpr int64_t row_bytes(int format, int64_t k) {
  return format == TERNARY                          ? round_up(k, 64) / 4
         : of_halves(format)                       ? 2 * k
         : format == INT8 || format == INT8_PANELS ? k
                                                   : k / 32 * (format == Q8_0 ? 34 : 18);
}

// Attention of float32 tensors whose heads lie side by side in a row: q [batch, queries, heads, size], k and v
// [batch, keys, key_heads, size], out [batch, queries, heads, size], which is dense; the others have strides, in values. The
// keys from `before` on, with their values, lie in own_k and own_v.
struct Attention {
  const float *q, *k, *v, *own_k, *own_v;
  const uint8_t* mask;  // [batch, queries, keys], 1 where a query sees a key; or null
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
  // Queries that read the same key head are rows of one matrix, `rows()` of them: head by head of a query, query by query.
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

// A norm of a row: (x - mean) / sqrt(variance + eps) where it is centred (LayerNorm), else x / sqrt(mean of squares + eps)
// (RMSNorm); times weight [k] and plus bias [k], where they are not null.
struct Norm {
  int centred;
  float eps;
  const float *weight, *bias;
};

// What stands between products (floats.h).
struct FloatKernels {
  int rows, tile;  // that attention takes together; of its smallest tile
  // Rows `first` to `last` of a key head.
  void (*attend)(const Attention&, int64_t batch, int64_t head, int64_t first, int64_t last, char* memory);
  // The same where products may be rounded to 16 bits; `attend` itself where that is not faster.
  void (*attend_rounded)(const Attention&, int64_t batch, int64_t head, int64_t first, int64_t last, char* memory);
  void (*gelu)(float* x, int64_t count);
  void (*silu_times)(float* gate, const float* up, int64_t count);
  void (*norm)(const float* x, int64_t k, const Norm& norm, float* out);
};

// Floats from one row of scores to the next: never a multiple of 4 KiB, where rows would share the same lines of a cache.
constexpr int64_t score_stride(int64_t keys) { return round_up(keys, 2 * CHANNELS) + CHANNELS; }

// Bytes that one call of `attend` works in: keys, values, and `rows` rows of scores, queries and results.
constexpr int64_t attend_bytes(const Attention& a, int rows) {
  const int64_t padded = round_up(a.keys, 2 * CHANNELS), width = round_up(a.size, 2 * CHANNELS);
  return 4 * (2 * padded * width + rows * (score_stride(a.keys) + 2 * width));
}

// One instruction set, as dispatch.cpp chooses it.
struct Set {
  const Kernels* products;
  const FloatKernels* floats;
  bool here;
  const Halves* halves;  // null where it does not multiply bfloat16
  const Tiles* tiles;    // of int8; null where it has none
  const Tiles* half_tiles;  // of bfloat16; likewise
  const char* name() const { return tiles == nullptr ? products->name : tiles->name; }
  bool takes(int format) const {
    if (format == BF16_TILES) return half_tiles != nullptr;
    return format == BF16_PANELS ? halves != nullptr : tiles != nullptr || products->takes_panels();
  }
};

const Set* set_here(int index);  // the index-th that this CPU has, best first; null behind the last

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512vnni_kernels();
const Halves* avx512bf16_halves();
const Tiles* amx_tiles(const char** why);  // null where this process has none, with the reason if the CPU has them
const Tiles* amx_half_tiles();             // of the same
const Kernels* neon_dotprod_kernels();
const Kernels* neon_i8mm_kernels();
const FloatKernels* portable_floats();
const FloatKernels* avx2_floats();
const FloatKernels* avx512_floats();
const FloatKernels* neon_floats();

}  // namespace lowbit
