"""Weights that stay in 8 or 4 bits in GPU memory: their store, and the choice of the components that keep them."""
