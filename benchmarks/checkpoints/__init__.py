"""Random checkpoints in the original layouts, of published or tiny sizes."""
