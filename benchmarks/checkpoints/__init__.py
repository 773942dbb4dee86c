"""Checkpoints with random weights, in the layout of each family's original code, in published or tiny sizes."""
