"""Decoders that convert the bytes of untrusted clients to numpy arrays."""
