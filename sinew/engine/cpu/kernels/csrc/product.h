// The functions of product.cpp and floats.cpp that the C interface and fused layers (layer.cpp) call.
#pragma once
#include "kernels.h"

namespace lowbit {

constexpr int MOST_LAYERS = 16;

// The operation on a row of activations before it is rounded.
enum Action : int { AS_IS = 0, NORMED = 1, GELU = 2, GELU_TIMES = 3, SILU_TIMES = 4, ACTIONS = 5 };

struct Layer {
  Weights weights;
  const float* bias;
  float* y;           // [rows][channels]
  const float* add;   // [rows][channels], added to the result; or null
  const float* gate;  // [channels], multiplied by the result before the addition; or null
  int64_t stride;     // distance between two rows of y and of add; 0 for `channels`
  int64_t apart() const { return stride ? stride : weights.channels; }
  int64_t panels() const { return (weights.channels + CHANNELS - 1) / CHANNELS; }
};

struct Call {
  const Set* set;
  const Layer* layers;
  int count;
  const float* x;   // [rows][k]
  const float* up;  // [rows][k], for actions with two inputs
  int action;
  Norm norm;
  float smallest;
  int64_t rows, k;
  int format;
  int64_t stride;  // distance between two rows of x and of up; 0 for k
  int64_t apart() const { return stride ? stride : k; }
};

// Return whether a call is valid: sizes, formats and supported products. The function does not check addresses.
bool fits(const Call& call, int threads);

// Compute y of all layers. May throw std::bad_alloc.
void multiply(const Call& call, int threads);

// Compute a.out. Return 0, 1 for invalid arguments, or 2 without enough memory.
int attend(const Set& set, const Attention& a, bool rounded, int threads);

}  // namespace lowbit
