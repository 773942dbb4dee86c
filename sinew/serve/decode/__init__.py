"""Decoders of untrusted bytes to numpy arrays."""
