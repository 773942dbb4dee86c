"""Read the GGUF files of the project vla.cpp as checkpoints, for all architectures of vla.cpp, and write bundles as
such files.

This package is imported only on demand. :mod:`sinew.core.registry` refers to the reader, and ``sinew export`` refers to
the writer.
"""
