"""Blocks of a model rewritten over fused operations."""
