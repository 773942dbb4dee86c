"""Engines: programs that execute a model on one device. The eager engine runs plain PyTorch, and all other engines
are compared with it.
"""
