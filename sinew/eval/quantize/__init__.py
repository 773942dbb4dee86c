"""Bundles in fewer bits, and what that costs."""
