"""Engines, which execute a model on one device. The eager engine is the reference for all other engines."""
