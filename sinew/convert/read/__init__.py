"""Readers of the file formats of checkpoints."""
