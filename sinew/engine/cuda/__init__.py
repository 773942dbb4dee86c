"""The engine for NVIDIA GPUs: one graph from camera frame to action chunk. ``docs/kernels.md`` lists its kernels."""
