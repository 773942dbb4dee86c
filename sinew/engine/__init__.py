"""How a model is executed on one device. The eager engine is the reference for all others."""
