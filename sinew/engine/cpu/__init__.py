"""The engine with compiled products of int8 activations with low-bit weights, and the compilation of its kernels."""
