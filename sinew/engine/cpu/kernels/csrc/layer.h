// The arguments of layer.cpp, as layer_kernels.py lays them out. The address of an absent tensor is null.
#pragma once
#include <cstdint>

namespace lowbit {
struct GivenLayer {
  const uint8_t* weight;
  const float *scale, *bias;
  int64_t channels, scales;
};
struct GivenProduct {
  int32_t format, count;
  int64_t k;
  float smallest;
  const GivenLayer* layers;
};
struct GivenNorm {
  int32_t there, centred;
  float eps;
  const float *weight, *bias;
};
struct GivenProjection {
  GivenNorm norm;
  GivenProduct product;
  int32_t turned, head;  // the first `turned` layers have heads of `head` channels that are rotated
};
struct GivenFinish {
  GivenProduct output;
  GivenNorm norm;
  GivenProduct up, down;  // up: one layer, or the layers gate and up
  int32_t action;
  const float *output_gate, *down_gate;
};

}  // namespace lowbit
