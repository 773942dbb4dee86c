"""The engine "cpu" multiplies int8 activations by low-bit weights with compiled C++ kernels.

This package also compiles them.
"""
