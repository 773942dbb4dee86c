"""Decoders from untrusted bytes to numpy arrays."""
