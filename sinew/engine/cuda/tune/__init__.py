"""Tiles and launch forms of the kernels: defaults, timing and stored choices."""
