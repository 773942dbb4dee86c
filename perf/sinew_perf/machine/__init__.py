"""Measure a machine, and fit the parameters of a prediction."""
