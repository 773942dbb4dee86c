// Attention and activations between products: the division into tasks for several threads, and the C interface.
#include "buffer.h"
#include "kernels.h"
#include "pool.h"
#include "product.h"

namespace lowbit {
namespace {

constexpr int64_t PART = 1 << 14;  // number of an activation's values that a task computes

template <class Task>
void in_parts(int64_t count, int threads, const Task& task) {
  Pool::get().run(threads, static_cast<int>((count + PART - 1) / PART), [&](int i) {
    const int64_t first = i * PART;
    task(first, count - first < PART ? count - first : PART);
  });
}

}  // namespace

int attend(const Set& set, const Attention& a, bool rounded, int threads) {
  constexpr int64_t MOST = 1 << 20;
  for (const int64_t size : {a.batch, a.queries, a.keys, a.heads, a.key_heads, a.size})
    if (size < 1 || size > MOST) return 1;
  if (threads < 1 || a.size > 1024 || a.heads % a.key_heads != 0 || a.before < 0 || a.before > a.keys ||
      (a.before < a.keys && (a.own_k == nullptr || a.own_v == nullptr)))
    return 1;
  const FloatKernels* floats = set.floats;
  auto attend = rounded ? floats->attend_rounded : floats->attend;
  int together = floats->rows, tile = floats->tile;  // the numbers of rows that are computed together, at most and at least
  if (rounded && set.half_tiles != nullptr) {
    attend = set.half_tiles->attend;
    together = tile = set.half_tiles->rows;
  } else if (rounded && set.halves != nullptr && set.halves->attend != nullptr) {
    attend = set.halves->attend;
    together = tile = set.halves->rows;
  }
  // A task computes one key head, because its keys and values are copied to another layout. If there are few key heads,
  // several tasks share the rows of one head.
  const int64_t heads = a.batch * a.key_heads, all = a.rows(), most = (all + 63) / 64;
  int64_t parts = (4 * threads + heads - 1) / heads;
  parts = threads == 1 ? 1 : parts > most ? most : parts;
  const int64_t rows = round_up((all + parts - 1) / parts, tile);
  std::atomic<int> failed{0};
  Pool::get().run(threads, static_cast<int>(heads * parts), [&](int task) {
    thread_local Buffer buffer;
    const int64_t part = task % parts, head = task / parts % a.key_heads, batch = task / parts / a.key_heads;
    const int64_t first = part * rows, last = first + rows < all ? first + rows : all;
    if (first >= last) return;
    try {
      attend(a, batch, head, first, last, static_cast<char*>(buffer.get(attend_bytes(a, together))));
    } catch (const std::bad_alloc&) {
      failed = 2;
    }
  });
  return failed;
}

}  // namespace lowbit

extern "C" {

// Compute out = softmax(q k^T * scale) v (see Attention in kernels.h). Return 0, 1 for invalid arguments, or 2 without
// enough memory. `sizes` has: batch, queries, keys, heads, key_heads, size, the six strides in the struct's order, 1 if
// products may be rounded to 16 bits, the number of keys in k and v, and the strides of own_k and own_v, which have the
// remaining keys.
PUBLIC int lowbit_attend(int kernels, const float* q, const float* k, const float* v, const float* own_k, const float* own_v,
                         const uint8_t* mask, float* out, const int64_t* sizes, float scale, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  const Attention a = {q,         k,         v,         own_k,     own_v,     mask,      out,       sizes[0],
                       sizes[1],  sizes[2],  sizes[3],  sizes[4],  sizes[5],  sizes[6],  sizes[7],  sizes[8],
                       sizes[9],  sizes[10], sizes[11], sizes[13], sizes[14], sizes[15], sizes[16], sizes[17], scale};
  return chosen == nullptr ? 1 : attend(*chosen, a, sizes[12] != 0, threads);
}

// Compute GELU in its tanh form for x [count], in place.
PUBLIC int lowbit_gelu(int kernels, float* x, int64_t count, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  if (chosen == nullptr || count < 0 || threads < 1) return 1;
  in_parts(count, threads, [&](int64_t at, int64_t n) { chosen->floats->gelu(x + at, n); });
  return 0;
}

// Compute gate [count] = silu(gate) * up [count], in place.
PUBLIC int lowbit_silu_times(int kernels, float* gate, const float* up, int64_t count, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  if (chosen == nullptr || count < 0 || threads < 1) return 1;
  in_parts(count, threads, [&](int64_t at, int64_t n) { chosen->floats->silu_times(gate + at, up + at, n); });
  return 0;
}

}  // extern "C"
