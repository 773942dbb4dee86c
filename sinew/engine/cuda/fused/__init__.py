"""Blocks of a model that are rewritten with fused operations."""
