// What the C interface and fused layers (layer.cpp) ask of product.cpp and floats.cpp.
#pragma once
#include "kernels.h"

namespace lowbit {

constexpr int MOST_LAYERS = 16;

// What becomes of a row of activations before it is rounded.
enum Action : int { AS_IS = 0, NORMED = 1, GELU = 2, GELU_TIMES = 3, SILU_TIMES = 4, ACTIONS = 5 };

struct Layer {
  Weights weights;
  const float* bias;
  float* y;           // [rows][channels]
  const float* add;   // [rows][channels], added to the result; or null
  const float* gate;  // [channels], multiplied with the result before; or null
  int64_t panels() const { return (weights.channels + CHANNELS - 1) / CHANNELS; }
};

struct Call {
  const Set* set;
  const Layer* layers;
  int count;
  const float* x;   // [rows][k]
  const float* up;  // the same, where an action takes two
  int action;
  Norm norm;
  float smallest;
  int64_t rows, k;
  int format;
};

// Whether a call makes sense: sizes, formats and what kernels can multiply. Addresses are not looked at.
bool fits(const Call& call, int threads);

// y of all layers. May throw std::bad_alloc.
void multiply(const Call& call, int threads);

// a.out. Returns 0, 1 for arguments that make no sense, 2 when memory is short.
int attend(const Set& set, const Attention& a, bool rounded, int threads);

}  // namespace lowbit
