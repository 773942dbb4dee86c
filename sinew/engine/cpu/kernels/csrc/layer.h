// What layer.cpp is given, as layer_kernels.py lays it out. Addresses of what is not there are null.
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
  int32_t turned, head;  // the first layers whose heads of that many channels are turned
};
struct GivenFinish {
  GivenProduct output;
  GivenNorm norm;
  GivenProduct up, down;  // up: gate and up where an action takes two
  int32_t action;
  const float *output_gate, *down_gate;
};

}  // namespace lowbit
