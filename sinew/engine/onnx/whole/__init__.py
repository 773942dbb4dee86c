"""Exports for runtimes that accept only one file: a graph of the whole policy, and fixed 8-bit scales for the
compilers of NPUs (neural processing units).
"""
