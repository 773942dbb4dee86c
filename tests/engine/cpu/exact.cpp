// Every kernel of this CPU against plain loops, products bit by bit, attention and activations to rounding: a program of its own, so that it also runs under an emulator
// of another CPU and under the sanitizers (tests/engine/cpu builds it). Arguments: cases and seed; or `kernels`; or format, rows, k and channels of one product.
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "layer.h"

extern "C" const char* lowbit_kernels(int index);
extern "C" int lowbit_takes_panels(int index, int format);
extern "C" const char* lowbit_attention(int index);
extern "C" int lowbit_multiply(int kernels, int format, const float* x, int64_t rows, int64_t k, float smallest,
                               const int64_t* layers, int count, int threads);
extern "C" int lowbit_resize(int kernels, const uint8_t* frame, const int32_t* lines, const void* row_weights,
                             const int32_t* starts, const uint8_t* picks, const void* column_weights,
                             const int64_t* sizes, void* out);
extern "C" int lowbit_resample(int kernels, const void* from, const int32_t* first, const void* weights, const int64_t* sizes,
                               void* to);
extern "C" int lowbit_jpeg(int kernels, const uint8_t* frame, const float* inverses, const int32_t* steps, uint8_t* out,
                           const int64_t* sizes);
extern "C" int lowbit_attend(int kernels, const float* q, const float* k, const float* v, const float* own_k,
                             const float* own_v, const uint8_t* mask, float* out, const int64_t* sizes, float scale,
                             int threads);
extern "C" int lowbit_gelu(int kernels, float* x, int64_t count, int threads);
extern "C" int lowbit_silu_times(int kernels, float* gate, const float* up, int64_t count, int threads);

extern "C" int lowbit_norm(int kernels, const float* x, int64_t rows, int64_t k, int centred, float eps, const float* weight,
                           const float* bias, float* out, int threads);
extern "C" int lowbit_project(int kernels, const void* projection, const float* x, int64_t rows, float* const* y,
                              const float* cosines, const float* sines, int64_t period, int threads);
extern "C" int lowbit_finish(int kernels, const void* finishing, const float* x, const float* attended, int64_t rows,
                             float* out, int threads);
extern "C" int lowbit_encode(int kernels, const void* projection, const void* finishing, const float* x, int64_t batch,
                             int64_t rows, float* out, const float* cosines, const float* sines, int64_t period, int rounded,
                             int threads);

using namespace lowbit;
static std::mt19937_64 random_bits;
static int below(int n) { return static_cast<int>(random_bits() % n); }

static float from_half(uint16_t half) {  // finite ones
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float value = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(float(fraction), -24);
  return half >> 15 ? -value : value;
}

struct Layer {
  std::vector<uint8_t> stored;
  std::vector<float> scale;           // what the call is given
  std::vector<std::vector<int>> w;    // [channels][k], integers
  std::vector<std::vector<float>> s;  // [channels][groups]
};

static Layer layer(int format, int64_t channels, int64_t k, int extreme) {
  Layer made;
  made.stored.resize(channels * row_bytes(format, k));  // exactly: the sanitizers see a byte too many
  made.w.assign(channels, std::vector<int>(k));
  if (of_halves(format)) {
    for (int64_t i = 0; i < channels * k; ++i) {
      const uint16_t half = uint16_t(below(2) << 15 | (100 + below(28)) << 7 | below(128));
      std::memcpy(made.stored.data() + 2 * i, &half, 2);
    }
    return made;
  }
  const int groups = TRAITS[format].group ? int(k / TRAITS[format].group) : 1;
  if (!TRAITS[format].group) made.scale.resize(below(2) ? 1 : channels);
  for (float& scale : made.scale) scale = std::ldexp(1.0f + below(1 << 20) / float(1 << 20), below(8) - 10);
  made.s.assign(channels, std::vector<float>(groups));
  for (int64_t c = 0; c < channels; ++c) {
    uint8_t* row = made.stored.data() + c * row_bytes(format, k);
    for (int64_t b = 0; b < row_bytes(format, k) && !of_panels(format); ++b) row[b] = uint8_t(below(256));
    for (int g = 0; g < groups; ++g) {
      made.s[c][g] = made.scale.size() == 1 ? made.scale[0] : made.scale.empty() ? 0 : made.scale[c];
      if (!TRAITS[format].group) continue;
      const uint16_t half = uint16_t(below(31 << 10) | below(2) << 15);
      std::memcpy(row + g * (format == Q8_0 ? 34 : 18), &half, 2);
      made.s[c][g] = from_half(half);
    }
    for (int64_t i = 0; i < k; ++i) {
      uint8_t* at;
      int code;
      if (format == TERNARY) {
        at = row + i / 64 * 16 + i % 16;
        const int shift = 2 * int(i / 16 % 4);
        code = extreme ? 2 * (extreme - 1) : below(3);
        *at = uint8_t((*at & ~(3 << shift)) | code << shift);
        made.w[c][i] = code - 1;
      } else if (format == Q4_0) {
        at = row + i / 32 * 18 + 2 + i % 16;
        const int shift = i % 32 < 16 ? 0 : 4;
        code = extreme ? 15 * (extreme - 1) : below(16);
        *at = uint8_t((*at & ~(15 << shift)) | code << shift);
        made.w[c][i] = code - 8;
      } else if (of_panels(format)) {
        const int unit = format == INT8_EIGHTS ? 8 : 4;
        at = made.stored.data() + c / CHANNELS * CHANNELS * k + (i / unit * CHANNELS + c % CHANNELS) * unit + i % unit;
        code = extreme ? 255 * (extreme - 1) - 128 : below(256) - 128;
        *at = uint8_t(code + (format == INT8_PANELS ? 128 : 0));
        made.w[c][i] = code;
      } else {
        at = format == INT8 ? row + i : row + i / 32 * 34 + 2 + i % 32;
        code = extreme ? 255 * (extreme - 1) - 128 : below(256) - 128;
        *at = uint8_t(int8_t(code));
        made.w[c][i] = code;
      }
    }
  }
  return made;
}

static bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, 4) == 0 || (a == 0 && b == 0);
}

static float normal(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }

// To the nearest bfloat16, ties to even.
static float to_bf16(float x) {
  if (std::isnan(x)) return x;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = bits + 0x7fff + (bits >> 16 & 1) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Return the sum of x(i) * w(i) over i < n in the order of tiles (sinew/layers/stores/lowbit.py).
template <class X, class W>
static float in_tiles(int64_t n, const X& x, const W& w) {
  float sum = 0, parts[2] = {};
  for (int64_t i = 0; i < n; ++i) {
    float& part = parts[i % 2];
    part = normal(float(double(part) + double(x(i)) * double(w(i))));
    if (i % 32 != 31 && i != n - 1) continue;
    sum = normal(sum + normal(parts[0] + parts[1]));
    parts[0] = parts[1] = 0;
  }
  return sum;
}

// Return a + b rounded to odd, and zero below 2^-126. The rounding mode is towards zero.
static float add_odd(float a, float b) {
  std::feclearexcept(FE_ALL_EXCEPT);
  volatile float one = a, other = b;
  volatile float sum = one + other;
  if (std::fetestexcept(FE_OVERFLOW)) return std::copysign(INFINITY, sum);
  uint32_t bits;
  float made = sum;
  std::memcpy(&bits, &made, 4);
  bits |= std::fetestexcept(FE_INEXACT) != 0;
  std::memcpy(&made, &bits, 4);
  return normal(made);
}

// Return the sum of x(i) * w(i) over i < n in the order of bfmmla, whose every step rounds to odd.
template <class X, class W>
static float in_odd(int64_t n, const X& x, const W& w) {
  std::fesetround(FE_TOWARDZERO);
  const auto product = [&](int64_t i) {  // it has 16 bits, so only its exponent may not fit
    const double exact = double(x(i)) * double(w(i));
    return std::fabs(exact) >= 0x1p128 ? std::copysign(INFINITY, float(exact)) : normal(float(exact));
  };
  float sum = 0;
  for (int64_t i = 0; i < n; i += 2) sum = add_odd(sum, add_odd(product(i), product(i + 1)));
  std::fesetround(FE_TONEAREST);
  return sum;
}

// Products of bfloat16 against sums in the stated order: 1, 0, 3, 2, ... of k, that of tiles, that of k, or that of bfmmla.
static bool check_halves(int kernels, int format, int64_t rows, int64_t k, int64_t channels, int threads) {
  Layer weights = layer(format, channels, k, 0);
  if (below(4) == 0) std::memset(weights.stored.data() + 2 * below(int(channels * k)), 0, 2);
  std::vector<float> x(rows * k), bias(channels), y(rows * channels, 1e9f);
  const int from = format >= BF16_FUSED && below(4) == 0 ? 116 : below(2) ? -140 : -6;
  for (float& value : x) value = (below(1 << 24) / float(1 << 23) - 1) * std::ldexp(1.0f, from + below(12));
  if (below(4) == 0) x[below(int(rows * k))] = below(2) ? NAN : INFINITY;
  for (float& b : bias) b = below(2000) / 1000.0f - 1;
  const bool biased = below(2);
  const auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); };
  const int64_t given[6] = {address(weights.stored.data()), 0, biased ? address(bias.data()) : 0, address(y.data()), channels, 0};
  if (lowbit_multiply(kernels, format, x.data(), rows, k, 1, given, 1, threads) != 0) return false;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < channels; ++c) {
      const auto weight = [&](int64_t at) {
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char*>(&bits) + 2,
                    weights.stored.data() + 2 * (c / CHANNELS * CHANNELS * k + (at / 2 * CHANNELS + c % CHANNELS) * 2 + at % 2), 2);
        float w;
        std::memcpy(&w, &bits, 4);
        return format == BF16_FUSED ? w : normal(w);
      };
      const auto value = [&](int64_t at) {
        const float x_at = x[r * k + at];
        return format == BF16_FUSED ? to_bf16(x_at) : format == BF16_ODD ? normal(to_bf16(x_at)) : to_bf16(normal(x_at));
      };
      float sum = 0;
      if (format == BF16_TILES) sum = in_tiles(k, value, weight);
      if (format == BF16_ODD) sum = in_odd(k, value, weight);
      for (int64_t i = 0; i < k && format == BF16_FUSED; ++i) sum = std::fma(value(i), weight(i), sum);
      for (int64_t i = 0; i < k && format == BF16_PANELS; ++i)
        sum = normal(float(double(sum) + double(value(i ^ 1)) * double(weight(i ^ 1))));
      const float wanted = biased ? sum + bias[c] : sum;
      if (!same(wanted, y[r * channels + c])) {
        std::printf("format %d: row %d, channel %d: %a, got %a\n", format, int(r), int(c), wanted, y[r * channels + c]);
        return false;
      }
    }
  return true;
}

static bool check(int kernels, int format, int64_t rows, int64_t k, int64_t channels, int extreme, int threads) {
  const Layer weights = layer(format, channels, k, extreme);
  const float smallest = below(2) ? 1e-5f : 1e-30f;
  std::vector<float> x(rows * k), bias(channels), y(rows * channels, 1e9f);
  for (int64_t r = 0; r < rows; ++r) {
    const int kind = extreme ? 1 + below(2) : below(8);
    for (int64_t i = 0; i < k; ++i) {
      const float uniform = below(1 << 24) / float(1 << 23) - 1;
      x[r * k + i] = kind == 0   ? 0.0f
                     : kind == 1 ? 3.5f
                     : kind == 2 ? -3.5f
                     : kind == 3 ? uniform * 1e-33f
                     : kind == 4 ? (i == 0 ? 127.0f : below(255) - 127 + 0.5f * below(2))  // ties
                                 : uniform * std::ldexp(1.0f, below(12) - 6);
    }
    if (!extreme && below(16) == 0) x[r * k + below(int(k))] = below(2) ? NAN : INFINITY;
  }
  for (float& b : bias) b = below(2000) / 1000.0f - 1;
  const bool biased = below(2);
  const auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); };
  const int64_t scale_at = weights.scale.empty() ? 0 : address(weights.scale.data());
  // And a second layer of the first rows, without bias: whole panels where they lie so.
  const int64_t first = of_panels(format) ? CHANNELS * below(int(channels / CHANNELS) + 1) : below(int(channels) + 1);
  std::vector<float> y2(rows * first, 1e9f);
  const int64_t scales = int64_t(weights.scale.size());
  const int64_t given[12] = {address(weights.stored.data()), scale_at, biased ? address(bias.data()) : 0, address(y.data()),
                             channels,                       scales,   address(weights.stored.data()),    scale_at,
                             0,                              address(y2.data()), first,                   scales > 1 ? first : scales};
  const int status = lowbit_multiply(kernels, format, x.data(), rows, k, smallest, given, 2, threads);
  if (status != 0) {
    std::printf("status %d\n", status);
    return false;
  }
  const int64_t group = TRAITS[format].group ? TRAITS[format].group : k;
  for (int64_t r = 0; r < rows; ++r) {
    float largest = smallest;
    bool finite = true;
    for (int64_t i = 0; i < k; ++i) {
      finite = finite && std::isfinite(x[r * k + i]);
      largest = std::fmax(largest, std::fabs(x[r * k + i]));
    }
    volatile float scale = 127.0f / largest, inverse = 1.0f / scale;
    for (int64_t c = 0; c < channels; ++c) {
      volatile float sum = 0;  // volatile: neither fused nor wider than float
      for (int64_t g = 0; g < k / group; ++g) {
        int64_t whole = 0;
        for (int64_t i = g * group; finite && i < (g + 1) * group; ++i) {
          volatile float scaled = x[r * k + i] * scale;
          whole += int64_t(std::nearbyint(scaled)) * weights.w[c][i];
        }
        volatile float term = float(whole) * weights.s[c][g];
        sum = sum + term;
      }
      volatile float expected = sum * inverse;
      if (c < first && !same(finite ? expected : NAN, y2[r * first + c])) {
        std::printf("%s format %d: second layer: expected %.9g, got %.9g\n", lowbit_kernels(kernels), format, expected,
                    y2[r * first + c]);
        return false;
      }
      if (biased) expected = expected + bias[c];
      if (!finite) expected = NAN;
      if (!same(expected, y[r * channels + c])) {
        std::printf("%s format %d, %ld x %ld x %ld, extreme %d: row %ld channel %ld: expected %.9g, got %.9g\n",
                    lowbit_kernels(kernels), format, long(rows), long(k), long(channels), extreme, long(r), long(c),
                    expected, y[r * channels + c]);
        return false;
      }
    }
  }
  return true;
}

// The attention for one query [size] as attend_halves.h defines it, with sums in the order of tiles, or of bfmmla if `odd`: key(j)
// and value(j) are rows, sees(j) the mask. The result may differ from that of double by `bound`, which follows from the 8 bits of
// bfloat16.
template <class Key, class Value, class Sees>
static std::vector<float> attend_in_halves(bool odd, const float* q, int64_t size, int64_t keys, float scale, const Key& key,
                                           const Value& value, const Sees& sees, double* bound) {
  const auto half = [odd](float x) { return odd ? normal(to_bf16(x)) : to_bf16(normal(x)); };
  const auto product = [odd](int64_t n, const auto& x, const auto& w) {
    if (!odd) return in_tiles(n, x, w);
    const auto padded = [n](const auto& at) { return [n, &at](int64_t i) { return i < n ? at(i) : 0.0f; }; };
    return in_odd(n, padded(x), padded(w));
  };
  volatile float factor = scale * 1.44269504f;
  const int64_t padded = round_up(keys, 32);
  std::vector<float> scores(padded, -INFINITY), weights(padded), out(size);
  std::vector<float> query(size);  // before the sums, which may change the rounding mode
  for (int64_t d = 0; d < size; ++d) query[d] = half(q[d] * factor);
  double steps = 0, largest = 0;  // of the scores, in natural logarithms; and of the values
  for (int64_t j = 0; j < keys; ++j) {
    double sizes = 0;
    scores[j] = product(size, [&](int64_t d) { return query[d]; }, [&](int64_t d) { return half(key(j)[d]); });
    for (int64_t d = 0; d < size; ++d) {
      sizes += std::fabs(double(q[d]) * key(j)[d] * scale);
      largest = std::fmax(largest, std::fabs(value(j)[d]));
    }
    steps = std::fmax(steps, sizes);
    if (!sees(j)) scores[j] = -INFINITY;
  }
  float top = -INFINITY;
  for (float score : scores) top = std::fmax(top, score);
  if (top == -INFINITY) {
    std::fill(scores.begin(), scores.begin() + keys, 0.0f);
    top = 0;
  }
  float sums[16] = {};
  for (int64_t j = 0; j < padded; ++j) {
    volatile float x = scores[j] - top, n = x + 12582912.0f, less = n - 12582912.0f, r = x - less;
    volatile float p = r * 0.0550090224f, c = p + 0.2422113121f, d = c * r, e = d + 0.6932829618f, f = e * r, g = f + 1.0f;
    float weight = x < -120 ? 0.0f : std::ldexp(g, int(less));
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    bits = (bits + 0x8000) & 0xffff0000u;
    std::memcpy(&weights[j], &bits, 4);
    sums[j % 16] += weights[j];
  }
  for (int apart = 8; apart > 0; apart /= 2)
    for (int i = 0; i < apart; ++i) sums[i] += sums[i + apart];
  const float inverse = 1 / sums[0];
  const auto place = [](int64_t i) { return i / 32 * 32 + i % 2 * 16 + i % 32 / 2; };
  for (int64_t d = 0; d < size; ++d)
    out[d] = inverse * product(padded, [&](int64_t i) { return weights[place(i)]; },
                               [&](int64_t i) { return place(i) < keys ? half(value(place(i))[d]) : 0.0f; });
  // A factor has a relative error of 2^-9, so a score has two. Weights differ by twice their largest error, and are rounded.
  *bound = largest * (2 * std::expm1(2 * std::ldexp(steps, -9)) + 3 * std::ldexp(1.0, -9) + 3e-4);
  return out;
}

// Attention over tensors that end where their last row does, and activations of any length, against double.
static bool check_between(int kernels, int64_t queries, int64_t keys) {
  const int64_t batch = 1 + below(2), key_heads = 1 + below(2);
  const int64_t heads = key_heads * (1 + below(3)), size = 1 + below(70), threads = 1 + below(3);
  const bool masked = below(2);
  const auto random_floats = [](int64_t n, float scale) {
    std::vector<float> made(n);
    for (float& value : made) value = scale * (below(1 << 24) / float(1 << 23) - 1);
    return made;
  };
  const std::vector<float> q = random_floats(batch * queries * heads * size, 4);
  const std::vector<float> k = random_floats(batch * keys * key_heads * size, 2);
  const std::vector<float> v = random_floats(batch * keys * key_heads * size, 1);
  std::vector<uint8_t> mask(batch * queries * keys);
  for (uint8_t& seen : mask) seen = below(2);
  std::vector<float> out(batch * queries * heads * size);
  const float scale = 1 / std::sqrt(float(size));
  const int64_t q_row = heads * size, k_row = key_heads * size;
  const int64_t before = below(int(keys) + 1);  // the others lie in tensors of their own, which end with them, too
  const auto parted = [&](const std::vector<float>& whole, bool own) {
    std::vector<float> made;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = own ? before : 0; i < (own ? keys : before); ++i)
        for (int64_t d = 0; d < key_heads * size; ++d) made.push_back(whole[(b * keys + i) * key_heads * size + d]);
    return made;
  };
  const std::vector<float> first_k = parted(k, false), first_v = parted(v, false), own_k = parted(k, true), own_v = parted(v, true);
  int64_t sizes[18] = {batch,           queries, keys,         heads, key_heads,    size,
                             queries * q_row, q_row,   before * k_row, k_row, before * k_row, k_row, 0,
                             before, (keys - before) * k_row, k_row, (keys - before) * k_row, k_row};
  std::vector<float> rounded(out.size());
  const uint8_t* seen = masked ? mask.data() : nullptr;
  if (lowbit_attend(kernels, q.data(), first_k.data(), first_v.data(), own_k.data(), own_v.data(), seen, out.data(), sizes, scale, threads) != 0) return false;
  sizes[12] = 1;
  if (lowbit_attend(kernels, q.data(), first_k.data(), first_v.data(), own_k.data(), own_v.data(), seen, rounded.data(), sizes, scale, threads) != 0) return false;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < queries; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t shared = h / (heads / key_heads);
        std::vector<double> scores(keys), wanted(size);
        double top = -1e300, sum = 0;
        for (int64_t j = 0; j < keys; ++j) {
          double score = 0;
          for (int64_t d = 0; d < size; ++d)
            score += double(q[((b * queries + i) * heads + h) * size + d]) * k[((b * keys + j) * key_heads + shared) * size + d];
          scores[j] = masked && !mask[(b * queries + i) * keys + j] ? -3.4028234663852886e38 : score * scale;
          top = std::fmax(top, scores[j]);
        }
        for (double& score : scores) sum += score = std::exp(score - top);
        double bound = 4e-3;
        std::vector<float> halves;
        const std::string order = lowbit_attention(kernels);
        if (order == "bf16-tiles" || order == "bf16-odd")
          halves = attend_in_halves(
              order == "bf16-odd", &q[((b * queries + i) * heads + h) * size], size, keys, scale,
              [&](int64_t j) { return &k[((b * keys + j) * key_heads + shared) * size]; },
              [&](int64_t j) { return &v[((b * keys + j) * key_heads + shared) * size]; },
              [&](int64_t j) { return !masked || mask[(b * queries + i) * keys + j]; }, &bound);
        for (int64_t d = 0; d < size; ++d) {
          for (int64_t j = 0; j < keys; ++j) wanted[d] += scores[j] / sum * v[((b * keys + j) * key_heads + shared) * size + d];
          const double got = out[((b * queries + i) * heads + h) * size + d];
          const double coarse = rounded[((b * queries + i) * heads + h) * size + d];
          if (!halves.empty() && !same(halves[d], float(coarse))) {
            std::printf("%s attention %s: expected %a, got %a\n", lowbit_kernels(kernels), order.c_str(), halves[d], coarse);
            return false;
          }
          if (!(std::fabs(got - wanted[d]) < 1e-5) || !(std::fabs(coarse - wanted[d]) < bound)) {
            std::printf("%s attention: expected %g, got %g and rounded %g\n", lowbit_kernels(kernels), wanted[d], got, coarse);
            return false;
          }
        }
      }
  const int64_t n = below(100);
  const std::vector<float> x = random_floats(n, 12), up = random_floats(n, 2);
  std::vector<float> activated = x, gated = x;
  if (lowbit_gelu(kernels, activated.data(), n, threads) != 0 ||
      lowbit_silu_times(kernels, gated.data(), up.data(), n, threads) != 0)
    return false;
  for (int64_t i = 0; i < n; ++i) {
    const double w = x[i], u = std::sqrt(2 / M_PI) * (w + 0.044715 * w * w * w);
    const double gelu = w / (1 + std::exp(-2 * u)), silu = w / (1 + std::exp(-w)) * up[i];
    if (!(std::fabs(activated[i] - gelu) <= 5e-7 * std::fabs(w)) ||
        !(std::fabs(gated[i] - silu) <= 5e-7 * std::fabs(w * up[i]))) {
      std::printf("%s activation of %g: %g %g\n", lowbit_kernels(kernels), w, activated[i], gated[i]);
      return false;
    }
  }
  return true;
}

using namespace lowbit;

static GivenLayer given(const Layer& from, const float* bias) {
  return {from.stored.data(), from.scale.empty() ? nullptr : from.scale.data(), bias, int64_t(from.w.size()),
          int64_t(from.scale.size())};
}

// The halves of a layer and the whole of it against the library's own parts, one by one, bit by bit.
static bool check_layer(int kernels, int format) {
  const int head = 16, heads = 2, width = head * heads, inner = 32 * (1 + below(2)), threads = 1 + below(3);
  const int64_t batch = 1 + below(2), rows = below(8) == 0 ? 505 + below(20) : 1 + below(20), all = batch * rows;
  const auto floats = [](int64_t n) {
    std::vector<float> made(n);
    for (float& value : made) value = below(1 << 24) / float(1 << 23) - 1;
    return made;
  };
  std::vector<Layer> layers;
  for (const auto& [out, k] : {std::pair<int, int>{width, width}, {width, width}, {width, width}, {width, width},
                               {inner, width}, {inner, width}, {width, inner}})
    layers.push_back(layer(format, out, k, 0));
  const std::vector<float> bias = floats(inner), weight = floats(width), shift = floats(width), gate = floats(width);
  const std::vector<float> x = floats(all * width), cosines = floats(rows * head / 2), sines = floats(rows * head / 2);
  std::vector<GivenLayer> at;
  for (const Layer& each : layers) at.push_back(given(each, below(2) ? bias.data() : nullptr));
  const bool normed = below(2), gated = below(2), turned = below(2), silu = below(2), rounded = below(2);
  const GivenNorm norm = {1, below(2), 1e-5f, weight.data(), below(2) ? shift.data() : nullptr};
  const auto product = [&](int first, int count, int64_t k) {
    return GivenProduct{format, count, k, 1e-30f, at.data() + first};
  };
  const GivenProjection before = {normed ? norm : GivenNorm{}, product(0, 3, width), 2, head};
  const int action = gated ? silu ? 4 : 3 : 2;
  const GivenFinish behind = {product(3, 1, width), norm, product(4, gated ? 2 : 1, width), product(6, 1, inner), action,
                              gate.data(), below(2) ? gate.data() : nullptr};
  const float *c = turned ? cosines.data() : nullptr, *s = turned ? sines.data() : nullptr;
  std::vector<float> y[3], out(all * width), whole(all * width);
  for (auto& each : y) each.resize(all * width);
  float* const made[3] = {y[0].data(), y[1].data(), y[2].data()};
  if (lowbit_project(kernels, &before, x.data(), all, made, c, s, rows, threads) != 0) return false;

  const auto times = [&](const std::vector<float>& from, int index, int64_t k) {
    std::vector<float> to(all * at[index].channels);
    const auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); };
    const int64_t one[6] = {address(at[index].weight), address(at[index].scale),  address(at[index].bias),
                            address(to.data()),        at[index].channels, at[index].scales};
    lowbit_multiply(kernels, format, from.data(), all, k, 1e-30f, one, 1, threads);
    return to;
  };
  const auto norm_of = [&](const std::vector<float>& from) {
    std::vector<float> to(from.size());
    lowbit_norm(kernels, from.data(), all, width, norm.centred, norm.eps, norm.weight, norm.bias, to.data(), threads);
    return to;
  };
  const auto join = [&](const std::vector<float>& stream, std::vector<float> branch, const float* gates) {
    for (int64_t i = 0; i < all * width; ++i) {
      volatile float scaled = gates == nullptr ? branch[i] : branch[i] * gates[i % width];
      branch[i] = stream[i] + scaled;
    }
    return branch;
  };
  const auto equal = [&](const std::vector<float>& a, const std::vector<float>& b, const char* what) {
    for (size_t i = 0; i < a.size(); ++i)
      if (!same(a[i], b[i])) {
        std::printf("%s format %d %s: expected %.9g, got %.9g\n", lowbit_kernels(kernels), format, what, a[i], b[i]);
        return false;
      }
    return true;
  };
  for (int i = 0; i < 3; ++i) {
    std::vector<float> wanted = times(normed ? norm_of(x) : x, i, width);
    for (int64_t h = 0; turned && i < 2 && h < all * heads; ++h)
      for (int d = 0; d < head / 2; ++d) {
        const int64_t row = h / heads % rows;
        float &a = wanted[h * head + d], &b = wanted[h * head + head / 2 + d];
        const float cosine = cosines[row * head / 2 + d], sine = sines[row * head / 2 + d];
        volatile float ac = a * cosine, bs = b * sine, bc = b * cosine, as = a * sine;
        a = ac - bs;
        b = bc + as;
      }
    if (!equal(wanted, y[i], "projection")) return false;
  }
  std::vector<float> attended(all * width);
  const int64_t sizes[18] = {batch, rows, rows, heads, heads, head, rows * width, width, rows * width, width, rows * width,
                             width, rounded, rows, 0, 0, 0, 0};
  const float scale = float(1 / std::sqrt(double(head)));
  if (lowbit_attend(kernels, y[0].data(), y[1].data(), y[2].data(), nullptr, nullptr, nullptr, attended.data(), sizes, scale,
                    threads) != 0)
    return false;
  const std::vector<float> joined = join(x, times(attended, 3, width), behind.output_gate);
  std::vector<float> between = times(norm_of(joined), 4, width);
  if (action == 4) {
    lowbit_silu_times(kernels, between.data(), times(norm_of(joined), 5, width).data(), all * inner, threads);
  } else {
    lowbit_gelu(kernels, between.data(), all * inner, threads);
    const std::vector<float> up = gated ? times(norm_of(joined), 5, width) : std::vector<float>();
    for (size_t i = 0; i < up.size(); ++i) between[i] *= up[i];
  }
  const std::vector<float> wanted = join(joined, times(between, 6, inner), behind.down_gate);
  if (lowbit_finish(kernels, &behind, x.data(), attended.data(), all, out.data(), threads) != 0 ||
      lowbit_encode(kernels, &before, &behind, x.data(), batch, rows, whole.data(), c, s, rows, rounded, threads) != 0)
    return false;
  return equal(wanted, out, "finish") && equal(wanted, whole, "layer");
}

static bool check_resize(int kernels) {
  const int from[2] = {1 + below(40), 1 + below(40)}, to[2] = {1 + below(40), 1 + below(60)};
  const int64_t row_bytes = 3 * from[1] + below(20), plane = to[0] * to[1];
  std::vector<uint8_t> frame((from[0] - 1) * row_bytes + 3 * from[1]);  // exactly
  for (uint8_t& byte : frame) byte = uint8_t(below(256));
  std::vector<int32_t> taps[2];
  std::vector<float> weights[2], out(3 * plane, -1.0f);
  for (int axis = 0; axis < 2; ++axis)
    for (int i = 0; i < 2 * to[axis]; ++i) {
      const int at = i % to[axis] * from[axis] / to[axis] + i / to[axis];
      taps[axis].push_back((at < from[axis] ? at : from[axis] - 1) * (axis ? 3 : 1));
      weights[axis].push_back(below(1 << 24) / float(1 << 24));
    }
  // As sinew/steps/image/bilinear.py lays them out, with every reach that the line has.
  const int wide = 3 * to[1], values = (wide + 7) / 8 * 8, line = 3 * from[1];
  std::vector<int32_t> starts(values / 2);
  std::vector<uint8_t> picks(8 * values, 128);
  std::vector<float> of_value(2 * values);
  const auto byte = [&](int side, int i) { return taps[1][side * to[1] + std::min(i, wide - 1) / 3] + std::min(i, wide - 1) % 3; };
  int64_t reach = line < 16 ? 0 : 16;
  for (int i = 0; i < values; i += 4)
    if (byte(1, i + 3) - byte(0, i) / 3 * 3 > 15) reach = 0;
  if (reach == 0 && line >= 8) reach = 8;
  for (int i = 0; i < 2 * values; ++i) {
    const int side = i / values, at = i % values, four = at / 4 * 2;
    const int begin[2] = {byte(0, at / 4 * 4) / 3 * 3, byte(0, at / 4 * 4 + 3) / 3 * 3};
    starts[four] = std::max(std::min(begin[0], line - (reach == 16 ? 16 : 8)), 0);
    starts[four + 1] = reach == 16 ? starts[four] + 8 : std::max(std::min(begin[1], line - 8), 0);
    const int behind = byte(side, at) - starts[four] >= 8;
    for (int k = 0; k < 3; ++k) picks[4 * i + k] = uint8_t(byte(side, at) - starts[four + behind] + 8 * behind);
    const float weight = weights[1][std::min(at, wide - 1) / 3];
    of_value[i] = (side ? weight : 1.0f - weight) / (1 << 24);
  }
  int64_t sizes[7] = {row_bytes, to[0], to[1], reach, to[1], plane, 0};
  if (lowbit_resize(kernels, frame.data(), taps[0].data(), weights[0].data(), starts.data(), picks.data(), of_value.data(),
                    sizes, out.data()))
    return false;
  for (int64_t i = 0; i < 3 * plane; ++i) {
    const int c = int(i / plane), y = int(i % plane / to[1]), x = int(i % to[1]);
    float lines[2];
    for (int l = 0; l < 2; ++l) {
      const uint8_t* line = frame.data() + taps[0][l * to[0] + y] * row_bytes + c;
      lines[l] = line[taps[1][x]] / 255.0f * (1.0f - weights[1][x]) + line[taps[1][to[1] + x]] / 255.0f * weights[1][x];
    }
    if (!same(out[i], lines[0] * (1.0f - weights[0][y]) + lines[1] * weights[0][y])) {
      std::printf("resize at %d %d %d: %.9g\n", c, y, x, out[i]);
      return false;
    }
  }
  std::vector<int32_t> whole[2];  // the same as OpenCV's
  for (int y = 0; y < 2 * to[0]; ++y)
    whole[0].push_back(int32_t((y < to[0] ? 1.0f - weights[0][y] : weights[0][y - to[0]]) * 2048));
  for (int i = 0; i < values; ++i) {
    const int weight = int(weights[1][std::min(i, wide - 1) / 3] * 2048);
    whole[1].push_back(2048 - weight + weight * 65536);
  }
  std::vector<uint8_t> bytes(3 * plane);
  sizes[6] = 1;
  if (lowbit_resize(kernels, frame.data(), taps[0].data(), whole[0].data(), starts.data(), picks.data(), whole[1].data(), sizes,
                    bytes.data()))
    return false;
  for (int64_t i = 0; i < 3 * plane; ++i) {
    const int y = int(i / wide), x = int(i % wide / 3), weight = whole[1][i % wide] >> 16;
    int sum = 2;
    for (int l = 0; l < 2; ++l) {
      const uint8_t* line = frame.data() + taps[0][l * to[0] + y] * row_bytes + i % 3;
      sum += ((line[taps[1][x]] * (2048 - weight) + line[taps[1][to[1] + x]] * weight) >> 4) * whole[0][l * to[0] + y] >> 16;
    }
    if (bytes[i] != sum >> 2) {
      std::printf("resize to bytes at %d %d: %d\n", y, x, bytes[i]);
      return false;
    }
  }
  std::vector<float> second(values);  // and TensorFlow's crop
  for (int i = 0; i < values; ++i) second[i] = weights[1][std::min(i, wide - 1) / 3];
  sizes[6] = 2;
  if (lowbit_resize(kernels, frame.data(), taps[0].data(), weights[0].data(), starts.data(), picks.data(), second.data(), sizes,
                    bytes.data()))
    return false;
  const auto between = [](float a, float b, float weight) {
    volatile float more = (b - a) * weight;
    return a + more;
  };
  for (int64_t i = 0; i < 3 * plane; ++i) {
    const int y = int(i / wide), x = int(i % wide / 3);
    float lines[2];
    for (int l = 0; l < 2; ++l) {
      const uint8_t* line = frame.data() + taps[0][l * to[0] + y] * row_bytes + i % 3;
      const float over = float(1 / 255.0);
      lines[l] = between(line[taps[1][x]] * over, line[taps[1][to[1] + x]] * over, weights[1][x]);
    }
    const float value = std::min(std::max(between(lines[0], lines[1], weights[0][y]), 0.0f), 1.0f) * 255.5f;
    if (bytes[i] != int(std::min(value, 255.0f))) {
      std::printf("crop at %d %d: %d\n", y, x, bytes[i]);
      return false;
    }
  }
  return true;
}

template <class From, class To, class Weight>
static bool check_resample(int kernels) {
  const int64_t height = 1 + below(40), width = 1 + below(40), axis = below(2), size = axis ? width : height;
  const int64_t target = 1 + below(60), taps = 1 + below(int(size)), gap = below(4) * sizeof(From);
  const int64_t bits = sizeof(To) == 1 ? 1 + below(22) : 0, row = 3 * width * sizeof(From) + gap;
  std::vector<From> frame(((height - 1) * row) / sizeof(From) + 3 * width);  // exactly
  for (From& value : frame) value = From(below(256)) / (sizeof(From) == 4 ? From(255) : From(1));
  std::vector<int32_t> first(target);
  for (int32_t& each : first) each = below(int(size - taps + 1));
  std::vector<Weight> weights(target * taps);
  for (Weight& w : weights) w = Weight((below(1 << 20) / float(1 << 19) - 0.5f) / taps * (bits ? 1 << bits : 1));
  const int64_t wide = axis ? target : width, lines = axis ? height : target;
  std::vector<To> out(3 * wide * lines);
  const int64_t sizes[8] = {row, height, width, axis, target, taps, bits, sizeof(From) == 4};
  if (lowbit_resample(kernels, frame.data(), first.data(), weights.data(), sizes, out.data())) return false;
  for (int64_t i = 0; i < int64_t(out.size()); ++i) {
    const int64_t y = i / (3 * wide), x = i / 3 % wide, at = axis ? x : y;
    Weight sum = Weight(bits ? 1 << (bits - 1) : 0);
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t from = first[at] + tap;
      volatile Weight product = frame[(axis ? y : from) * (row / sizeof(From)) + 3 * (axis ? from : x) + i % 3] * weights[at * taps + tap];
      sum += product;
    }
    if (bits) sum = Weight(std::min(std::max(int64_t(sum) >> bits, int64_t(0)), int64_t(255)));
    if (!same(float(out[i]), float(sum))) {
      std::printf("resample at %d %d, axis %d: %.9g\n", int(y), int(x), int(axis), float(out[i]));
      return false;
    }
  }
  return true;
}

// Every set gives the bytes of the last one, which tests hold against numpy.
static bool check_jpeg(int kernels) {
  const int64_t height = 1 + below(60), width = 1 + below(300), row = 3 * width + below(4), sizes[3] = {row, height, width};
  std::vector<uint8_t> frame((height - 1) * row + 3 * width), found(3 * height * width), wanted(found.size());  // exactly
  for (uint8_t& byte : frame) byte = uint8_t(std::min(below(300), 255));
  std::vector<float> inverses(128);
  std::vector<int32_t> steps(128);
  for (int i = 0; i < 128; ++i) {
    const int step = 1 + below(255);
    inverses[i] = 1.0f / (8 * step);
    steps[i] = step * (4 + below(4));
  }
  int last = kernels;
  while (lowbit_kernels(last + 1) != nullptr) ++last;
  for (const auto& [set, out] : {std::pair(last, &wanted), std::pair(kernels, &found)})
    if (lowbit_jpeg(set, frame.data(), inverses.data(), steps.data(), out->data(), sizes)) return false;
  if (found != wanted) std::printf("jpeg of %d x %d\n", int(height), int(width));
  return found == wanted;
}

// Print every set of kernels with the formats of panels that it computes, and its products in rounded attention.
static int list_kernels() {
  for (int kernels = 0; lowbit_kernels(kernels) != nullptr; ++kernels) {
    std::printf("%s", lowbit_kernels(kernels));
    for (int format = INT8_PANELS; format < FORMATS; ++format)
      if (lowbit_takes_panels(kernels, format)) std::printf(" %d", format);
    std::printf(", attention %s\n", lowbit_attention(kernels));
  }
  return 0;
}

// Multiply the numbers of the standard input, x [rows][k] and panels of bfloat16, with 1, 2 and 3 threads, and write the results.
static int product(int format, int64_t rows, int64_t k, int64_t channels) {
  std::vector<float> x(rows * k), y(rows * channels);
  std::vector<uint8_t> weights(channels * row_bytes(format, k));
  if (std::fread(x.data(), 4, x.size(), stdin) != x.size() || std::fread(weights.data(), 1, weights.size(), stdin) != weights.size())
    return 1;
  int kernels = 0;
  while (lowbit_kernels(kernels) != nullptr && !lowbit_takes_panels(kernels, format)) ++kernels;
  const auto address = [](const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); };
  const int64_t given[6] = {address(weights.data()), 0, 0, address(y.data()), channels, 0};
  for (int threads = 1; threads <= 3; ++threads) {
    if (lowbit_multiply(kernels, format, x.data(), rows, k, 1, given, 1, threads) != 0) return 1;
    std::fwrite(y.data(), 4, y.size(), stdout);
  }
  return 0;
}

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "kernels") == 0) return list_kernels();
  if (count == 5) return product(std::atoi(arguments[1]), std::atoi(arguments[2]), std::atoi(arguments[3]), std::atoi(arguments[4]));
  const int cases = count > 1 ? std::atoi(arguments[1]) : 200;
  random_bits.seed(count > 2 ? std::atoi(arguments[2]) : 1);
  for (int kernels = 0; lowbit_kernels(kernels) != nullptr; ++kernels) {
    for (int i = 0; i < cases; ++i) {
      const int format = i % BF16_PANELS, extreme = below(3), large = below(8) == 0;
      int64_t k = large ? 256 + below(1024) : 1 + below(200);
      if (TRAITS[format].group) k = round_up(k, 32);
      int64_t channels = 1 + below(large ? 80 : 40);
      if (of_panels(format)) {
        k = round_up(k, 8);
        channels = round_up(channels, CHANNELS);
      }
      const bool taken = !of_panels(format) || lowbit_takes_panels(kernels, format);
      for (int half = BF16_PANELS; half < FORMATS; ++half)
        if (lowbit_takes_panels(kernels, half) &&
            !(check_halves(kernels, half, 1 + below(large && half < BF16_FUSED ? 70 : 30), 8 * (1 + below(large ? 100 : 9)), CHANNELS * (1 + below(6)),
                           1 + below(3)) &&
              check_layer(kernels, half)))
          return 1;
      if (taken && !check(kernels, format, 1 + below(large ? 70 : 14), k, channels, extreme, 1 + below(3))) return 1;
      if (!check_between(kernels, 1 + below(30), 1 + below(60)) || !check_resize(kernels) || !check_jpeg(kernels)) return 1;
      if (!check_resample<uint8_t, uint8_t, int32_t>(kernels) || !check_resample<uint8_t, float, float>(kernels) ||
          !check_resample<float, float, float>(kernels))
        return 1;
      if (taken && !check_layer(kernels, format)) return 1;
    }
    // Rows that are longer than a part of k, panels that are no pair, and a last block of few rows.
    for (const int format : {TERNARY, INT8, INT8_PANELS, INT8_FOURS, INT8_EIGHTS, BF16_PANELS, BF16_TILES, BF16_FUSED, BF16_ODD}) {
      const int64_t rows = 33 + below(8), k = 8 * (520 + below(600)), channels = CHANNELS * (9 + 2 * below(2)), threads = 1 + below(3);
      if (format >= INT8_PANELS && !lowbit_takes_panels(kernels, format)) continue;
      // The formats of ARM have no parts of k, and an emulator adds their products slowly.
      if (!(format >= BF16_FUSED    ? check_halves(kernels, format, rows / 2, k, 3 * CHANNELS, threads)
            : of_halves(format) ? check_halves(kernels, format, rows, k, channels, threads)
                              : check(kernels, format, rows, k, channels, 0, threads)))
        return 1;
    }
    if (!check_between(kernels, 1 + below(2), 513 + below(60))) return 1;  // more keys than a part of k
    std::printf("%s: %d cases exact\n", lowbit_kernels(kernels), cases);
  }
  return 0;
}
