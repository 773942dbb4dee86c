"""Readers of the file formats that checkpoints come in."""
