// The two parts of a transformer layer, before and after its attention, one call each
// (sinew/engine/cpu/kernels/layer_kernels.py). Intermediate results stay near the cores, and no thread waits for the
// caller between products.
#include <cmath>

#include "buffer.h"
#include "layer.h"
#include "pool.h"
#include "product.h"

namespace lowbit {
namespace {

// Number of rows that the MLP computes at once, so that intermediate results stay near the cores. The numbers are
// multiples of a tile's rows, so that 2,048 rows leave no slice of a few rows that would read all weights.
constexpr int64_t SLICE = 504, TILES_SLICE = 512;
// A whole layer stores the keys and values of this many rows at once. One member of the batch may need more.
constexpr int64_t ROWS = 1024;

// Return the thread's memory for values between products. The keys and values of a whole layer are read before its
// `finish` begins, so both can use the same memory.
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

// Rotate the heads of a row in place: each half with the other half, by the row's cosines and sines [head / 2].
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
    const int64_t apart = row_stride(inner);
    float* joined = static_cast<float*>(between_products().get((width + given.up.count * apart) * slice * sizeof(float)));
    float* between = joined + width * slice;
    for (int i = 0; i < given.up.count; ++i) {
      up.layers[i].y = between + i * apart * slice;
      up.layers[i].stride = apart;
    }
    down.call.x = between;
    down.call.up = between + apart * slice;
    down.call.stride = apart;
    for (int64_t first = 0; first < rows; first += slice) {
      const int64_t these = rows - first < slice ? rows - first : slice;
      output.call.rows = up.call.rows = down.call.rows = these;
      output.call.x = attended + first * output.call.k;
      output.layers[0].add = x + first * width;
      output.layers[0].y = joined;
      multiply(output.call, threads);
      up.call.x = joined;
      multiply(up.call, threads);
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

// Compute a norm of each row: x [rows, k] -> out.
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

// Compute the part before an attention: the norm of x [rows, k] times each layer -> y [rows, channels] for each layer.
// The heads of the first layers are rotated by cosines and sines [period, head / 2], which repeat after `period` rows.
// Without cosines, no head is rotated. Return 0, 1 for invalid arguments, or 2 without enough memory.
PUBLIC int lowbit_project(int kernels, const void* projection, const float* x, int64_t rows, float* const* y,
                          const float* cosines, const float* sines, int64_t period, int threads) {
  using namespace lowbit;
  return project(set_here(kernels), *static_cast<const GivenProjection*>(projection), x, rows, y, cosines, sines, period,
                 threads);
}

// Compute the part after an attention: h = x + attended W_o, and out = h + down(action(up(norm(h)))). Each branch is
// multiplied by its gate [channels] if it has one. x and out are [rows, width], attended is [rows, k]. Return values as
// in lowbit_project.
PUBLIC int lowbit_finish(int kernels, const void* finishing, const float* x, const float* attended, int64_t rows, float* out,
                         int threads) {
  using namespace lowbit;
  return finish(set_here(kernels), *static_cast<const GivenFinish*>(finishing), x, attended, rows, out, threads);
}

// Compute a whole layer whose rows all attend to each other: x [batch, rows, width] -> out. Queries, keys and values
// are the projection's three layers with the same number of heads, of `head` channels each. cosines, sines and period
// are as in lowbit_project, and `rounded` as in lowbit_attend. Keys and values are in memory that belongs to the
// thread. Return values as in lowbit_project.
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
    // Queries, the layer's input and the result share memory. A thread writes rows of it only after it has read them.
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
