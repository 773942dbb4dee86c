"""Compiled kernels for low-bit and float products. The kernels do not depend on the engine that runs them."""
