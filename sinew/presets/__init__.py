"""Random checkpoints in the upstream layouts, of published or tiny sizes, and a golden policy with its answers."""
