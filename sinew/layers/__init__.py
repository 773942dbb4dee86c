"""Blocks that models are made of. Shapes: B batch, L length, H heads, D head size, C channels."""
