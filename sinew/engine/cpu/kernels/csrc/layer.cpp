// The two halves of a transformer layer, one call each (sinew/engine/cpu/kernels/layer_kernels.py): what stands between their
// products neither leaves the cores nor waits for a caller.
#include <cmath>

#include "buffer.h"
#include "layer.h"
#include "pool.h"
#include "product.h"

namespace lowbit {
namespace {

// Rows that a perceptron takes at once: what lies between its products stays near the cores. Whole blocks of tiles: 2,048 rows
// leave no slice of a few rows that reads all weights.
constexpr int64_t SLICE = 504, TILES_SLICE = 512;
constexpr int64_t ROWS = 1024;  // whose keys and values a whole layer holds at once, more only where one member has more

// Where a thread keeps what lies between products. Keys and values of a whole layer are read before its `finish` begins, so
// both have one place.
Buffer& between_products() {
  thread_local Buffer buffer;
  return buffer;
}

struct Product {
  Layer layers[MOST_LAYERS] = {};
  Call call = {};
  Product(const Set* set, const GivenProduct& given) {
    call.set = set;
    call.layers = layers;
    call.count = given.count;
    call.k = given.k;
    call.smallest = given.smallest;
    call.format = given.format;
    for (int i = 0; i < given.count && i < MOST_LAYERS; ++i) {
      const GivenLayer& from = given.layers[i];
      layers[i].weights = {from.weight, from.scale, from.scales, from.channels, given.k, given.format};
      layers[i].bias = from.bias;
    }
  }
  Product(const Product&) = delete;
  void normed(const GivenNorm& given) {
    if (!given.there) return;
    call.action = NORMED;
    call.norm = {given.centred, given.eps, given.weight, given.bias};
  }
  int64_t channels() const { return layers[0].weights.channels; }
};

// Heads of a row, turned in place: each half against the other, by the row's cosines and sines [head / 2].
void turn(float* row, int64_t channels, int head, const float* cosines, const float* sines) {
  const int half = head / 2;
  for (float* a = row; a < row + channels; a += head) {
    float* b = a + half;
    for (int i = 0; i < half; ++i) {
      const float low = a[i] * cosines[i], less = b[i] * sines[i], high = b[i] * cosines[i], more = a[i] * sines[i];
      a[i] = low - less;
      b[i] = high + more;
    }
  }
}

int project(const Set* set, const GivenProjection& given, const float* x, int64_t rows, float* const* y,
            const float* cosines, const float* sines, int64_t period, int threads) {
  const int turned = cosines == nullptr ? 0 : given.turned;
  if (given.product.count < 1 || given.product.count > MOST_LAYERS || turned < 0 || turned > given.product.count || rows < 1)
    return 1;
  Product product(set, given.product);
  product.normed(given.norm);
  product.call.x = x;
  product.call.rows = rows;
  for (int i = 0; i < given.product.count; ++i) {
    product.layers[i].y = y[i];
    if (i < turned && (given.head < 2 || given.head % 2 != 0 || product.layers[i].weights.channels % given.head != 0 ||
                             period < 1))
      return 1;
  }
  if (!fits(product.call, threads)) return 1;
  try {
    multiply(product.call, threads);
  } catch (const std::exception&) {
    return 2;
  }
  if (turned == 0) return 0;
  int64_t width = 0;
  for (int i = 0; i < turned; ++i) width += product.layers[i].weights.channels;
  const int64_t part = (1 << 14) / width + 1;
  Pool::get().run(threads, static_cast<int>((rows + part - 1) / part), [&](int task) {
    for (int64_t row = task * part; row < rows && row < (task + 1) * part; ++row)
      for (int i = 0; i < turned; ++i) {
        const int64_t channels = product.layers[i].weights.channels, at = row % period * (given.head / 2);
        turn(y[i] + row * channels, channels, given.head, cosines + at, sines + at);
      }
  });
  return 0;
}

int finish(const Set* set, const GivenFinish& given, const float* x, const float* attended, int64_t rows, float* out,
           int threads) {
  const bool gated = given.action == GELU_TIMES || given.action == SILU_TIMES;
  if (given.output.count != 1 || given.down.count != 1 || given.up.count != (gated ? 2 : 1) || rows < 1 ||
      (given.action != GELU && !gated))
    return 1;
  Product output(set, given.output), up(set, given.up), down(set, given.down);
  const int64_t width = output.channels(), inner = up.channels();
  if (up.call.k != width || down.call.k != inner || down.channels() != width ||
      (gated && up.layers[1].weights.channels != inner))
    return 1;
  up.normed(given.norm);
  down.call.action = given.action;
  if (!fits(output.call, threads) || !fits(up.call, threads) || !fits(down.call, threads)) return 1;
  output.layers[0].gate = given.output_gate;
  down.layers[0].gate = given.down_gate;
  try {
    const int64_t most = set->tiles ? TILES_SLICE : SLICE, slice = rows < most ? rows : most;
    float* joined = static_cast<float*>(between_products().get((width + given.up.count * inner) * slice * sizeof(float)));
    float* between = joined + width * slice;
    for (int64_t first = 0; first < rows; first += slice) {
      const int64_t these = rows - first < slice ? rows - first : slice;
      output.call.rows = up.call.rows = down.call.rows = these;
      output.call.x = attended + first * output.call.k;
      output.layers[0].add = x + first * width;
      output.layers[0].y = joined;
      multiply(output.call, threads);
      up.call.x = joined;
      up.layers[0].y = between;
      if (gated) up.layers[1].y = between + inner * slice;
      multiply(up.call, threads);
      down.call.x = between;
      down.call.up = between + inner * slice;
      down.layers[0].add = joined;
      down.layers[0].y = out + first * width;
      multiply(down.call, threads);
    }
  } catch (const std::exception&) {
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace lowbit

extern "C" {

// A norm of each row: x [rows, k] -> out.
PUBLIC int lowbit_norm(int kernels, const float* x, int64_t rows, int64_t k, int centred, float eps, const float* weight,
                       const float* bias, float* out, int threads) {
  using namespace lowbit;
  const Set* chosen = set_here(kernels);
  if (chosen == nullptr || rows < 0 || k < 1 || threads < 1) return 1;
  const Norm norm = {centred, eps, weight, bias};
  const int64_t part = (1 << 14) / k + 1;
  Pool::get().run(threads, static_cast<int>((rows + part - 1) / part), [&](int task) {
    for (int64_t i = task * part; i < rows && i < (task + 1) * part; ++i) chosen->floats->norm(x + i * k, k, norm, out + i * k);
  });
  return 0;
}

// What stands before an attention: x [rows, k], normed, times each layer -> y [rows, channels] of each, heads of the first
// ones turned by the row's cosines and sines [period, head / 2], which begin anew after `period` rows; none where there are
// no cosines. Returns 0, 1 for arguments that make no sense, 2 when memory is short.
PUBLIC int lowbit_project(int kernels, const void* projection, const float* x, int64_t rows, float* const* y,
                          const float* cosines, const float* sines, int64_t period, int threads) {
  using namespace lowbit;
  return project(set_here(kernels), *static_cast<const GivenProjection*>(projection), x, rows, y, cosines, sines, period,
                 threads);
}

// What stands behind an attention: h = x + attended W_o, out = h + down(action(up(norm(h)))), each branch times its gate
// [channels] where it has one. x and out [rows, width], attended [rows, k]. Returns as lowbit_project.
PUBLIC int lowbit_finish(int kernels, const void* finishing, const float* x, const float* attended, int64_t rows, float* out,
                         int threads) {
  using namespace lowbit;
  return finish(set_here(kernels), *static_cast<const GivenFinish*>(finishing), x, attended, rows, out, threads);
}

// A whole layer whose rows all see each other: x [batch, rows, width] -> out; queries, keys and values are the projection's
// three layers, of as many heads each, `head` channels a head. cosines, sines and period as lowbit_project has them; rounded
// as lowbit_attend. Keys and values are in memory that a thread keeps. Returns as lowbit_project.
PUBLIC int lowbit_encode(int kernels, const void* projection, const void* finishing, const float* x, int64_t batch,
                         int64_t rows, float* out, const float* cosines, const float* sines, int64_t period, int rounded,
                         int threads) {
  using namespace lowbit;
  const Set* set = set_here(kernels);
  const GivenProjection& before = *static_cast<const GivenProjection*>(projection);
  const GivenFinish& behind = *static_cast<const GivenFinish*>(finishing);
  if (set == nullptr || batch < 1 || rows < 1 || before.product.count != 3 || before.head < 1) return 1;
  const int64_t width = behind.output.k, size = rows * width;
  for (int i = 0; i < 3; ++i)
    if (before.product.layers[i].channels != width) return 1;
  if (width % before.head != 0 || (cosines != nullptr && period < 1)) return 1;
  if (width != behind.down.layers[0].channels) return 1;
  const int64_t most = ROWS / rows < batch ? ROWS / rows : batch, together = most < 1 ? 1 : most;
  float* keys;
  try {
    keys = static_cast<float*>(between_products().get(2 * together * size * sizeof(float)));
  } catch (const std::exception&) {
    return 2;
  }
  Attention a = {};
  a.queries = a.keys = a.before = rows, a.size = before.head;
  a.heads = a.key_heads = width / before.head;
  a.q_batch = a.k_batch = a.v_batch = size;
  a.q_row = a.k_row = a.v_row = width;
  a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(before.head)));
  for (int64_t first = 0; first < batch; first += together) {
    a.batch = batch - first < together ? batch - first : together;
    // Queries, what they see and the result lie in one place: whoever writes rows of it has read them before.
    float* const y[3] = {out + first * size, keys, keys + a.batch * size};
    a.q = a.out = y[0], a.k = y[1], a.v = y[2];
    const int64_t turned = cosines == nullptr ? 0 : first * rows % period * (before.head / 2);
    const float *cosine = cosines == nullptr ? nullptr : cosines + turned, *sine = sines == nullptr ? nullptr : sines + turned;
    if (const int status = project(set, before, x + first * size, a.batch * rows, y, cosine, sine, period, threads)) return status;
    if (const int status = attend(*set, a, rounded != 0, threads)) return status;
  }
  return finish(set, behind, x, out, batch * rows, out, threads);
}

}  // extern "C"
