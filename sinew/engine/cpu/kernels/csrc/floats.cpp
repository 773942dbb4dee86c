// Attention and activations between products: shared among threads, behind the C interface.
#include "buffer.h"
#include "kernels.h"
#include "pool.h"

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
}  // namespace lowbit

extern "C" {

// out = softmax(q k^T * scale) v, as kernels.h says of Attention. Returns 0, 1 for arguments that make no sense, 2 when
// memory is short. `sizes`: batch, queries, keys, heads, key_heads, size, the six strides in the struct's order, and 1
// where products may be rounded to 16 bits.
PUBLIC int lowbit_attend(int kernels, const float* q, const float* k, const float* v, const uint8_t* mask, float* out,
                         const int64_t* sizes, float scale, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  const Attention a = {q,        k,        v,        mask,     out,      sizes[0],  sizes[1],  sizes[2], sizes[3], sizes[4],
                       sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], sizes[11], scale};
  constexpr int64_t MOST = 1 << 20;
  for (int i = 0; i < 6; ++i)
    if (sizes[i] < 1 || sizes[i] > MOST) return 1;
  if (chosen == nullptr || threads < 1 || a.size > 1024 || a.heads % a.key_heads != 0) return 1;
  const FloatKernels* floats = chosen->floats;
  const auto attend = sizes[12] ? floats->attend_rounded : floats->attend;
  // A head is a task, because its keys and values are laid out anew; where heads are few, its rows are shared.
  int64_t parts = (4 * threads + a.batch * a.heads - 1) / (a.batch * a.heads);
  const int64_t most = (a.queries + 63) / 64;
  parts = threads == 1 ? 1 : parts > most ? most : parts;
  const int64_t rows = round_up((a.queries + parts - 1) / parts, floats->rows);
  std::atomic<int> failed{0};
  Pool::get().run(threads, static_cast<int>(a.batch * a.heads * parts), [&](int task) {
    thread_local Buffer buffer;
    const int64_t part = task % parts, head = task / parts % a.heads, batch = task / parts / a.heads;
    const int64_t first = part * rows, last = first + rows < a.queries ? first + rows : a.queries;
    if (first >= last) return;
    try {
      attend(a, batch, head, first, last, static_cast<char*>(buffer.get(attend_bytes(a, floats->rows))));
    } catch (const std::bad_alloc&) {
      failed = 2;
    }
  });
  return failed;
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
