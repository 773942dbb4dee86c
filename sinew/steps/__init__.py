"""The processing steps that convert an observation to a model's inputs, and a model's outputs to actions.

Each step is one class in one file.
"""
