// Attention and activations between products: shared among threads, behind the C interface.
#include "buffer.h"
#include "kernels.h"
#include "pool.h"
#include "product.h"

namespace lowbit {
namespace {

constexpr int64_t PART = 1 << 14;  // values of an activation that a task computes

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
  const auto attend = rounded ? floats->attend_rounded : floats->attend;
  // A key head is a task, because its keys and values are laid out anew; where they are few, its rows are shared.
  const int64_t heads = a.batch * a.key_heads, all = a.rows(), most = (all + 63) / 64;
  int64_t parts = (4 * threads + heads - 1) / heads;
  parts = threads == 1 ? 1 : parts > most ? most : parts;
  const int64_t rows = round_up((all + parts - 1) / parts, floats->tile);
  std::atomic<int> failed{0};
  Pool::get().run(threads, static_cast<int>(heads * parts), [&](int task) {
    thread_local Buffer buffer;
    const int64_t part = task % parts, head = task / parts % a.key_heads, batch = task / parts / a.key_heads;
    const int64_t first = part * rows, last = first + rows < all ? first + rows : all;
    if (first >= last) return;
    try {
      attend(a, batch, head, first, last, static_cast<char*>(buffer.get(attend_bytes(a, floats->rows))));
    } catch (const std::bad_alloc&) {
      failed = 2;
    }
  });
  return failed;
}

}  // namespace lowbit

extern "C" {

// out = softmax(q k^T * scale) v, as kernels.h says of Attention. Returns 0, 1 for arguments that make no sense, 2 when
// memory is short. `sizes`: batch, queries, keys, heads, key_heads, size, the six strides in the struct's order, 1 where
// products may be rounded to 16 bits, how many keys lie in k and v, and the strides of own_k and own_v, which hold the others.
PUBLIC int lowbit_attend(int kernels, const float* q, const float* k, const float* v, const float* own_k, const float* own_v,
                         const uint8_t* mask, float* out, const int64_t* sizes, float scale, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  const Attention a = {q,         k,         v,         own_k,     own_v,     mask,      out,       sizes[0],
                       sizes[1],  sizes[2],  sizes[3],  sizes[4],  sizes[5],  sizes[6],  sizes[7],  sizes[8],
                       sizes[9],  sizes[10], sizes[11], sizes[13], sizes[14], sizes[15], sizes[16], sizes[17], scale};
  return chosen == nullptr ? 1 : attend(*chosen, a, sizes[12] != 0, threads);
}

// GELU in its tanh form, of x [count] in place.
PUBLIC int lowbit_gelu(int kernels, float* x, int64_t count, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  if (chosen == nullptr || count < 0 || threads < 1) return 1;
  in_parts(count, threads, [&](int64_t at, int64_t n) { chosen->floats->gelu(x + at, n); });
  return 0;
}

// gate [count] = silu(gate) * up [count], in place.
PUBLIC int lowbit_silu_times(int kernels, float* gate, const float* up, int64_t count, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  if (chosen == nullptr || count < 0 || threads < 1) return 1;
  in_parts(count, threads, [&](int64_t at, int64_t n) { chosen->floats->silu_times(gate + at, up + at, n); });
  return 0;
}

}  // extern "C"
