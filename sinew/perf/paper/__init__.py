"""Reproduction of the published VLA-Perf tables and figures."""
