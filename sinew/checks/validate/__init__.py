"""Verify on this machine that an engine computes a bundle like the reference engine."""
