"""Compiled kernels of low-bit and of float products, apart from the engine that runs them."""
