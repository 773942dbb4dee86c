"""Measurements of a machine, and the parameters fitted to them."""
