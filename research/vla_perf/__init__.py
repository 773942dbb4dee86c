"""Reproduction of the tables and figures of two papers: `python -m research.vla_perf`. README.md says which."""
