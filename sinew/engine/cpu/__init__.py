"""Compiled products of int8 activations with low-bit weights, and how they come to this machine."""

from sinew.engine.cpu.library import Extension, extension

__all__ = ["Extension", "extension"]
