// AMX: products of int8 and bfloat16, and attention, with tiles. In memory, 16 units of a panel (1 KiB) already have the
// layout of a tile's second operand, so weights need no second layout. Rows of activations are tiles of 16 rows x 64
// bytes. Up to two tiles of rows are multiplied by two panels at once: four loads for four products.
#define LOWBIT_VECTOR 64
#include "attend_halves.h"
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

typedef int32_t Ints __attribute__((vector_size(4 * CHANNELS)));

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

// The products of attention (attend_halves.h), with 32 queries at a time. A row of scores becomes the row of a tile.
class Products {
 public:
  static constexpr int ROWS = lowbit::ROWS;
  static void round(const float* x, int64_t k, int8_t* out) { lowbit::round(x, k, out); }

  Products(int64_t padded, int64_t width, int64_t, char* memory)
      : padded_(padded), width_(width), stride_(row_stride(padded)), queries_(memory),
        scores_(reinterpret_cast<float*>(memory + 2 * ROWS * width)), out_(scores_ + ROWS * stride_) {}

  float* scores(int64_t row, int64_t panel) const { return scores_ + row * stride_ + panel * CHANNELS; }
  const float* results(int64_t row, int64_t panel) const { return out_ + row * width_ + panel * CHANNELS; }
  void weigh(int64_t row, int64_t i, int, Words both) const {
    std::memcpy(scores_ + row * stride_ + i / 2, &both, sizeof both);
  }

  void multiply_keys(const int8_t* lines, int64_t rows, const char* keys) const {
    pack(lines, 2 * width_, rows, queries_);
    const int64_t steps = width_ / PAIR, panel = steps * tiles::SIZE;
    for (int64_t i = 0; i < padded_; i += PAIR, keys += 2 * panel)
      both({queries_, tiles::BYTES, tiles::SIZE, panel, {keys, keys + panel}, steps, nullptr, bytes(scores_ + i), row_bytes(),
            CHANNELS * sizeof(float), false},
           rows);
  }

  void multiply_values(int64_t rows, const char* values) const {
    const int64_t steps = padded_ / PAIR, panel = steps * tiles::SIZE;
    for (int64_t d = 0; d < width_; d += PAIR, values += 2 * panel)
      both({bytes(scores_), row_bytes(), tiles::BYTES, tiles::ROWS * row_bytes(), {values, values + panel}, steps, nullptr,
            bytes(out_ + d), width_ * static_cast<int64_t>(sizeof(float)), CHANNELS * sizeof(float), false},
           rows);
  }

 private:
  static char* bytes(float* p) { return reinterpret_cast<char*>(p); }
  int64_t row_bytes() const { return stride_ * sizeof(float); }
  static void both(const Operands& o, int64_t rows) { (rows > tiles::ROWS ? add<true, 2, 2> : add<true, 1, 2>)(o, nullptr); }

  const int64_t padded_, width_, stride_;
  char* const queries_;  // [ROWS / 16][width / 32] tiles
  float* const scores_;  // [ROWS][stride]
  float* const out_;     // [ROWS][width]
};

void attend(const Attention& a, int64_t b, int64_t head, int64_t first, int64_t last, char* memory) {
  tiles::begin();
  attend_halves<Products>(a, b, head, first, last, memory);
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
