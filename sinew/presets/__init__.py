"""Random checkpoints in the original layouts, of published or tiny sizes, and a golden policy with its expected
results.
"""
