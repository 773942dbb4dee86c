"""vla.cpp's GGUF files, of all the architectures that it has: read as checkpoints, and written from bundles.

Nothing in here is imported but by name: :mod:`sinew.core.registry` names the reader, ``sinew export`` the writer.
"""
