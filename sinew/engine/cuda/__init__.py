"""The engine for NVIDIA GPUs: one CUDA graph from camera frame to action chunk. ``docs/kernels.md`` lists its
kernels."""
