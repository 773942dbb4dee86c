"""Exports for runtimes that accept one file only: a graph of the whole policy, and static 8-bit scales for NPU
compilers."""
