"""Read vla.cpp's GGUF files of all its architectures as checkpoints, and write bundles as such files.

This package is imported only on demand. :mod:`sinew.core.registry` names the reader, and ``sinew export`` the writer.
"""
