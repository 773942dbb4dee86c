"""Upstream families: each module turns one published layout into a bundle."""
