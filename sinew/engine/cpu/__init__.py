"""Compiled products of int8 activations with low-bit weights, and how they come to this machine."""
