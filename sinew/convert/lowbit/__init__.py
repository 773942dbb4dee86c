"""Weights of few bits: which are rounded, how, and what sizes recipes have."""
