// AMX: products of int8 and bfloat16, and attention, with tiles. In memory, 16 units of a panel (1 KiB) already have the
// layout of a tile's second operand, so weights need no second layout. Rows of activations are tiles of 16 rows x 64
// bytes. Up to two tiles of rows are multiplied by two panels at once: four loads for four products.
#include "kernels.h"
#include "rows.h"
#include "tiles.h"

namespace lowbit {
namespace {

constexpr int ROWS = 2 * tiles::ROWS;
static_assert(ROWS <= MAX_ROWS && tiles::ROWS == CHANNELS);

// Return the bytes of a block, with rows and their bytes padded to whole tiles.
int64_t block_bytes(int64_t bytes, int rows) { return round_up(rows, tiles::ROWS) * round_up(bytes, tiles::BYTES); }

// Convert [rows][bytes] to [rows / 16][bytes / 64][16][64], with zeros after the last row and the last value.
void pack(const int8_t* x, int64_t bytes, int rows, void* block) {
  char* to = static_cast<char*>(block);
  for (int first = 0; first < rows; first += tiles::ROWS) {
    const int there = rows - first < tiles::ROWS ? rows - first : tiles::ROWS;
    for (int64_t at = 0; at < bytes; at += tiles::BYTES, to += tiles::SIZE) {
      const int64_t some = bytes - at < tiles::BYTES ? bytes - at : tiles::BYTES;
      if (there < tiles::ROWS || some < tiles::BYTES) std::memset(to, 0, tiles::SIZE);
      for (int r = 0; r < there; ++r) std::memcpy(to + r * tiles::BYTES, x + (first + r) * bytes + at, some);
    }
  }
}

template <bool HALVES, int C, int A, int B>
inline void dot() {
  if constexpr (HALVES)
    tiles::dot_halves<C, A, B>();
  else
    tiles::dot_bytes<C, A, B>();
}

typedef float Floats __attribute__((vector_size(4 * CHANNELS)));
typedef int32_t Ints __attribute__((vector_size(4 * CHANNELS)));
typedef uint32_t Words __attribute__((vector_size(4 * CHANNELS)));

template <class T>
inline T read(const void* from) {
  T made;
  std::memcpy(&made, from, sizeof made);
  return made;
}

// Finish one row of a tile in one panel.
template <bool HALVES>
inline void finish_row(const Ending& e, int row, int panel) {
  const int64_t first = panel * CHANNELS, at = row * e.stride + first;
  const char* const sums = static_cast<const char*>(e.sums) + (panel * MAX_ROWS + row) * sizeof(Floats);
  Floats y;
  if constexpr (HALVES)
    y = read<Floats>(sums);
  else
    y = __builtin_convertvector(read<Ints>(sums) - e.offsets[row], Floats) * read<Floats>(e.scales + first) * e.inverses[row];
  if (e.there - first < CHANNELS) {  // the last channels, if the panel is not full
    float values[CHANNELS];
    std::memcpy(values, &y, sizeof y);
    for (int64_t i = 0; first + i < e.there; ++i) {
      if (e.bias) values[i] += e.bias[first + i];
      if (e.gate) values[i] *= e.gate[first + i];
      e.y[at + i] = e.add ? e.add[at + i] + values[i] : values[i];
    }
    return;
  }
  if (e.bias) y += read<Floats>(e.bias + first);
  if (e.gate) y *= read<Floats>(e.gate + first);
  if (e.add) y = read<Floats>(e.add + at) + y;
  std::memcpy(e.y + at, &y, sizeof y);
}

template <bool HALVES>
inline void finish_rows(const Ending& e, int64_t first, int64_t last) {
  if (last > e.rows) last = e.rows;
  for (int64_t r = first; r < last; ++r) {
    finish_row<HALVES>(e, r, 0);
    if (e.there > CHANNELS) finish_row<HALVES>(e, r, 1);
  }
}

template <bool HALVES>
void finish(const Ending& e) {
  finish_rows<HALVES>(e, 0, e.rows);
}

// Where a product of tiles reads its rows and panels, and writes its sums. Distances are in bytes.
struct Operands {
  const char* x;
  int64_t row, step, apart;  // between two rows, two steps of k, and two tiles of rows
  const char* w[2];          // panels; the steps of a panel are tiles::SIZE bytes apart
  int64_t steps;
  const char (*tails)[tiles::SIZE];  // the panels' last step, if it is less than a tile; else null
  char* out;
  int64_t out_row, out_panel;  // between two rows of sums, and between the sums of two panels
  bool more;                   // add to the sums in `out`
};

template <int T>
inline void begin_sums(bool more, const char* sums, int64_t row) {
  if (more)
    tiles::load<T>(sums, row);
  else
    tiles::zero<T>();
}

// Multiply one or two tiles of rows by one or two panels. Between its steps, the function finishes the rows of `before`.
template <bool HALVES, int TALL, int PANELS>
inline void add(const Operands& o, const Ending* before) {
  const int64_t each = before && o.steps ? (before->rows + o.steps - 1) / o.steps : 0;
  const int64_t lower = tiles::ROWS * o.out_row;  // from the sums of the first tile of rows to those of the second
  begin_sums<0>(o.more, o.out, o.out_row);
  if (PANELS == 2) begin_sums<1>(o.more, o.out + o.out_panel, o.out_row);
  if (TALL == 2) begin_sums<2>(o.more, o.out + lower, o.out_row);
  if (TALL == 2 && PANELS == 2) begin_sums<3>(o.more, o.out + lower + o.out_panel, o.out_row);
  const auto step = [&](const char* rows, const char* first, const char* second) {
    tiles::load<4>(rows, o.row);
    tiles::load<6>(first, tiles::BYTES);
    dot<HALVES, 0, 4, 6>();
    if (PANELS == 2) {
      tiles::load<7>(second, tiles::BYTES);
      dot<HALVES, 1, 4, 7>();
    }
    if (TALL == 1) return;
    tiles::load<5>(rows + o.apart, o.row);
    dot<HALVES, 2, 5, 6>();
    if (PANELS == 2) dot<HALVES, 3, 5, 7>();
  };
  for (int64_t s = 0; s < o.steps; ++s) {
    const int64_t at = s * tiles::SIZE;
    step(o.x + s * o.step, o.w[0] + at, PANELS == 2 ? o.w[1] + at : nullptr);
    if (before) finish_rows<HALVES>(*before, s * each, (s + 1) * each);
  }
  if (before) finish_rows<HALVES>(*before, o.steps * each, before->rows);
  if (o.tails != nullptr) step(o.x + o.steps * o.step, o.tails[0], o.tails[1]);
  tiles::store<0>(o.out, o.out_row);
  if (PANELS == 2) tiles::store<1>(o.out + o.out_panel, o.out_row);
  if (TALL == 2) tiles::store<2>(o.out + lower, o.out_row);
  if (TALL == 2 && PANELS == 2) tiles::store<3>(o.out + lower + o.out_panel, o.out_row);
}

template <bool HALVES, int PANELS>
void multiply(const Tile& t, const Ending* before) {
  alignas(64) char tails[2][tiles::SIZE];
  const int64_t bytes = 4 * static_cast<int64_t>(t.units), steps = bytes / tiles::BYTES, rest = bytes % tiles::BYTES;
  Operands o = {static_cast<const char*>(t.x), tiles::BYTES, tiles::SIZE, t.apart,
                {static_cast<const char*>(t.w), static_cast<const char*>(t.w2)}, steps, rest ? tails : nullptr,
                reinterpret_cast<char*>(t.out), tiles::BYTES, MAX_ROWS * tiles::BYTES, t.more};
  if (rest) {  // less than a tile is left, and the bytes after it belong to another panel or to no panel
    std::memset(tails, 0, sizeof tails);
    for (int p = 0; p < PANELS; ++p) std::memcpy(tails[p], o.w[p] + steps * tiles::SIZE, CHANNELS * rest);
  }
  (t.rows > tiles::ROWS ? add<HALVES, 2, PANELS> : add<HALVES, 1, PANELS>)(o, before);
}

// Round to bfloat16, to nearest even. Numbers below 2^-126 become zeros, and NaN stays NaN.
void round(const float* x, int64_t k, int8_t* out) {
  for (int64_t i = 0; i < k; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const uint32_t size = bits & 0x7fffffffu, nearest = bits + 0x7fffu + (bits >> 16 & 1);
    const uint32_t made = size > 0x7f800000u ? bits | 0x400000u : size < 0x00800000u ? bits & 0x80000000u : nearest;
    const uint16_t half = static_cast<uint16_t>(made >> 16);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

// Attention in bfloat16 (Tiles::attend). Queries times scale * log2(e), keys and values are rounded to bfloat16, and
// scores are sums in the order of tiles (tiles.h). An attention weight is 2^(score - largest score), computed by power()
// and rounded to bfloat16, half away from zero. The weights are added in 16 sums, one for each key modulo 16, and these
// sums as in reduced(). The results are sums in the order of tiles, with the keys 0, 16, 1, 17, ... of each 32 keys,
// times the inverse of the sum of weights. The error is that of an attention in bfloat16 by PyTorch.

constexpr int PAIR = 2 * CHANNELS;  // keys of two panels, and values of k in one step

// Compute 2^x for x at most 0, with a relative error of at most 1.1e-4. Results below 2^-120 are zeros, and NaN stays NaN.
inline Floats power(Floats x) {
  const Floats shifted = x + 12582912.0f;  // with 1.5 * 2^23, the nearest whole number is in the low bits
  const Floats part = x - (shifted - 12582912.0f);
  const Floats p = ((part * 0.0550090224f + 0.2422113121f) * part + 0.6932829618f) * part + 1.0f;
  const Floats whole = (Floats)(((Words)shifted << 23) + 0x3f800000);
  return x < -120.0f ? Floats{} : p * whole;
}

// Combine the values 8 apart, then those 4, 2 and 1 apart.
template <class Function>
inline float reduced(Floats all, const Function& function) {
  float values[CHANNELS];
  std::memcpy(values, &all, sizeof values);
  for (int apart = CHANNELS / 2; apart > 0; apart /= 2)
    for (int i = 0; i < apart; ++i) values[i] = function(values[i], values[i + apart]);
  return values[0];
}

// Replace the scores of one query by attention weights in bfloat16, as the rows of a tile: of each 32 keys, 0, 16, 1, 17
// and so on. Return the sum of the weights, or NaN if a score is NaN.
float weights(float* scores, const uint8_t* seen, int64_t keys, int64_t padded) {
  const float none = -__builtin_inff();
  if (seen != nullptr)
    for (int64_t i = 0; i < keys; ++i) scores[i] = seen[i] ? scores[i] : none;
  for (int64_t i = keys; i < padded; ++i) scores[i] = none;
  Floats tops[2] = {none - Floats{}, none - Floats{}};  // two maxima, because each comparison waits for the one before
  for (int64_t i = 0; i < padded; i += PAIR)
    for (int h = 0; h < 2; ++h) {
      const Floats score = read<Floats>(scores + i + h * CHANNELS);
      tops[h] = score > tops[h] ? score : tops[h];
    }
  float most = reduced(tops[0] > tops[1] ? tops[0] : tops[1], [](float a, float b) { return a > b ? a : b; });
  if (most == none) {  // as in the reference, a row without visible keys averages all values
    for (int64_t i = 0; i < keys; ++i) scores[i] = scores[i] == none ? 0.0f : scores[i];
    most = 0.0f;
  }
  Floats sums = {};
  char* to = reinterpret_cast<char*>(scores);
  for (int64_t i = 0; i < padded; i += PAIR, to += tiles::BYTES) {
    Words halves[2];
    for (int h = 0; h < 2; ++h) {  // the low 16 bits of a NaN are zero, because it comes from bfloat16, so it stays NaN
      halves[h] = ((Words)power(read<Floats>(scores + i + h * CHANNELS) - most) + 0x8000) & 0xffff0000;
      sums += (Floats)halves[h];
    }
    const Words both = halves[0] >> 16 | halves[1];
    std::memcpy(to, &both, sizeof both);
  }
  return reduced(sums, [](float a, float b) { return a + b; });
}

void attend(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  const int64_t padded = round_up(a.keys, PAIR), width = round_up(a.size, PAIR), steps = width / PAIR;
  const int64_t stride = row_stride(a.keys), row_bytes = stride * sizeof(float);
  const auto take = [&](int64_t bytes) {
    char* at = memory;
    memory += bytes;
    return at;
  };
  char* keys = take(2 * padded * width);      // [padded / 16][steps] tiles
  char* values = take(2 * padded * width);    // [width / 16][padded / 32] tiles
  char* queries = take(2 * ROWS * width);     // [ROWS / 16][steps] tiles
  float* scores = reinterpret_cast<float*>(take(ROWS * row_bytes));
  float* out = reinterpret_cast<float*>(take(ROWS * width * sizeof(float)));
  int8_t* lines = reinterpret_cast<int8_t*>(take(2 * PAIR * width));  // rows in bfloat16, with zeros after `size`
  std::memset(lines, 0, 2 * PAIR * width);
  const auto line = [&](int64_t j, const float* from) {
    if (from != nullptr)
      round(from, a.size, lines + 2 * j * width);
    else
      std::memset(lines + 2 * j * width, 0, 2 * a.size);
  };
  for (int64_t i = 0; i < padded; i += CHANNELS) {
    for (int64_t j = 0; j < CHANNELS; ++j) line(j, i + j < a.keys ? a.key(b, head, i + j) : nullptr);
    for (int64_t s = 0; s < steps; ++s)
      transpose(reinterpret_cast<int32_t*>(lines) + s * CHANNELS, width / 2, CHANNELS,
                reinterpret_cast<int32_t*>(keys + (i / CHANNELS * steps + s) * tiles::SIZE));
  }
  for (int64_t i = 0; i < padded; i += PAIR) {
    for (int64_t j = 0; j < PAIR; ++j) line(j, i + j < a.keys ? a.value(b, head, i + j) : nullptr);
    const uint16_t* from = reinterpret_cast<uint16_t*>(lines);
    for (int64_t d = 0; d < width; d += CHANNELS)
      for (int64_t j = 0; j < CHANNELS; ++j) {
        const uint16_t *low = from + j * width + d, *high = low + CHANNELS * width;
        uint32_t pairs[CHANNELS];
        for (int n = 0; n < CHANNELS; ++n) pairs[n] = low[n] | static_cast<uint32_t>(high[n]) << 16;
        std::memcpy(values + (d / CHANNELS * (padded / PAIR) + i / PAIR) * tiles::SIZE + j * tiles::BYTES, pairs, sizeof pairs);
      }
  }
  const float factor = a.scale * 1.44269504f;  // log2(e)
  tiles::begin();
  for (int64_t row = first; row < last; row += ROWS) {
    const int64_t rows = last - row < ROWS ? last - row : ROWS;
    const bool two = rows > tiles::ROWS;
    for (int64_t r = 0; r < rows; ++r) {
      const float* q = a.query(b, head, row + r);
      for (int64_t d = 0; d < a.size; ++d) out[d] = q[d] * factor;
      line(r, out);
    }
    pack(lines, 2 * width, rows, queries);
    for (int64_t i = 0; i < padded; i += PAIR) {
      const char* panel = keys + i / CHANNELS * steps * tiles::SIZE;
      const Operands o = {queries, tiles::BYTES, tiles::SIZE, steps * tiles::SIZE, {panel, panel + steps * tiles::SIZE}, steps,
                          nullptr, reinterpret_cast<char*>(scores + i), row_bytes, CHANNELS * sizeof(float), false};
      (two ? add<true, 2, 2> : add<true, 1, 2>)(o, nullptr);
    }
    float totals[ROWS];
    for (int64_t r = 0; r < rows; ++r) totals[r] = weights(scores + r * stride, a.seen(b, row + r), a.keys, padded);
    for (int64_t d = 0; d < width; d += PAIR) {
      const int64_t next = padded / PAIR * tiles::SIZE;
      const char* panel = values + d / CHANNELS * next;
      const Operands o = {reinterpret_cast<char*>(scores), row_bytes, tiles::BYTES, tiles::ROWS * row_bytes, {panel, panel + next},
                          padded / PAIR, nullptr, reinterpret_cast<char*>(out + d),
                          width * static_cast<int64_t>(sizeof(float)), CHANNELS * sizeof(float), false};
      (two ? add<true, 2, 2> : add<true, 1, 2>)(o, nullptr);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float inverse = 1.0f / totals[r];
      float* y = a.result(b, head, row + r);
      for (int64_t d = 0; d < a.size; ++d) y[d] = out[r * width + d] * inverse;
    }
  }
  tiles::end();
}

const Tiles AMX = {"amx", ROWS, tiles::begin, tiles::end, nullptr, block_bytes, pack, multiply<false, 1>, multiply<false, 2>, finish<false>, nullptr};
const Tiles AMX_HALVES = {"amx", ROWS, tiles::begin, tiles::end, round, block_bytes, pack, multiply<true, 1>, multiply<true, 2>, finish<true>, attend};

}  // namespace

const Tiles* amx_tiles(const char** why) {
  if (!tiles::present()) return nullptr;
  if (tiles::permitted()) return &AMX;
  *why = "the system does not permit AMX to this process (arch_prctl)";
  return nullptr;
}

const Tiles* amx_half_tiles() { return &AMX_HALVES; }

}  // namespace lowbit
