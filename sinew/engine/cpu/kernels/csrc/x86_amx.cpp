// AMX: products of int8 by tiles. 16 units of a panel are a tile's second operand as they lie, 1 KiB in a row, so weights need
// no second layout. Rows of activations are tiles of 16 rows x 64 values. Up to two tiles of rows times two panels are
// multiplied at once: four loads for four products.
#include "kernels.h"
#include "tiles.h"

namespace lowbit {
namespace {

constexpr int ROWS = 2 * tiles::ROWS;
static_assert(ROWS <= MAX_ROWS && tiles::ROWS == CHANNELS);

int64_t block_bytes(int64_t k, int rows) { return round_up(rows, tiles::ROWS) * round_up(k, tiles::BYTES); }

// int8 [rows][k] -> [rows / 16][k / 64][16][64], with zeros behind the last row and the last value.
void pack(const int8_t* x, int64_t k, int rows, void* block) {
  char* to = static_cast<char*>(block);
  std::memset(block, 0, block_bytes(k, rows));
  for (int first = 0; first < rows; first += tiles::ROWS) {
    const int there = rows - first < tiles::ROWS ? rows - first : tiles::ROWS;
    for (int64_t at = 0; at < k; at += tiles::BYTES, to += tiles::SIZE) {
      const int64_t bytes = k - at < tiles::BYTES ? k - at : tiles::BYTES;
      for (int r = 0; r < there; ++r) std::memcpy(to + r * tiles::BYTES, x + (first + r) * k + at, bytes);
    }
  }
}

// Sums of one or two tiles of rows, `apart` bytes from each other, times one or two panels -> out [2][16][2][16].
template <int TALL, int PANELS>
void add(const char* x, int64_t apart, const char* const (&w)[2], int64_t steps, const char (*tails)[tiles::SIZE], int32_t* out) {
  tiles::zero<0>();
  if (PANELS == 2) tiles::zero<1>();
  if (TALL == 2) tiles::zero<2>();
  if (TALL == 2 && PANELS == 2) tiles::zero<3>();
  const auto step = [&](const char* rows, const char* first, const char* second) {
    tiles::load<4>(rows, tiles::BYTES);
    tiles::load<6>(first, tiles::BYTES);
    tiles::dot<0, 4, 6>();
    if (PANELS == 2) {
      tiles::load<7>(second, tiles::BYTES);
      tiles::dot<1, 4, 7>();
    }
    if (TALL == 1) return;
    tiles::load<5>(rows + apart, tiles::BYTES);
    tiles::dot<2, 5, 6>();
    if (PANELS == 2) tiles::dot<3, 5, 7>();
  };
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t at = s * tiles::SIZE;
    step(x + at, w[0] + at, PANELS == 2 ? w[1] + at : nullptr);
  }
  if (tails != nullptr) step(x + steps * tiles::SIZE, tails[0], tails[1]);
  constexpr int64_t stride = 2 * CHANNELS * sizeof(int32_t);
  tiles::store<0>(out, stride);
  if (PANELS == 2) tiles::store<1>(out + CHANNELS, stride);
  if (TALL == 2) tiles::store<2>(out + 2 * CHANNELS * tiles::ROWS, stride);
  if (TALL == 2 && PANELS == 2) tiles::store<3>(out + 2 * CHANNELS * tiles::ROWS + CHANNELS, stride);
}

template <int PANELS>
void multiply(const Tile& t) {
  alignas(64) char tails[2][tiles::SIZE];
  alignas(64) int32_t sums[ROWS][2][CHANNELS];
  const int64_t k = 4 * static_cast<int64_t>(t.units), steps = k / tiles::BYTES, rest = k % tiles::BYTES;
  const char* const w[2] = {static_cast<const char*>(t.w), static_cast<const char*>(t.w2)};
  if (rest) {  // less than a tile is left: what lies behind it is another panel, or nobody's
    std::memset(tails, 0, sizeof tails);
    for (int p = 0; p < PANELS; ++p) std::memcpy(tails[p], w[p] + steps * tiles::SIZE, CHANNELS * rest);
  }
  const int64_t apart = round_up(k, tiles::BYTES) * tiles::ROWS;
  const auto product = t.rows > tiles::ROWS ? add<2, PANELS> : add<1, PANELS>;
  product(static_cast<const char*>(t.x), apart, w, steps, rest ? tails : nullptr, &sums[0][0][0]);
  for (int r = 0; r < t.rows; ++r)
    for (int p = 0; p < PANELS; ++p)
      for (int c = 0; c < CHANNELS; ++c)
        t.out[(p * MAX_ROWS + r) * CHANNELS + c] = static_cast<float>(sums[r][p][c] - t.offsets[r]) * t.scales[p * CHANNELS + c];
}

const Tiles AMX = {"amx", ROWS, tiles::begin, tiles::end, block_bytes, pack, multiply<1>, multiply<2>};

}  // namespace

const Tiles* amx_tiles(const char** why) {
  if (!tiles::present()) return nullptr;
  if (tiles::permitted()) return &AMX;
  *why = "the system does not permit it to this process (arch_prctl)";
  return nullptr;
}

}  // namespace lowbit
