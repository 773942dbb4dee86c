"""Proof that an engine computes a bundle as the reference does, on this machine."""
