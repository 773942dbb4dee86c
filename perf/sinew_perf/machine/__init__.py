"""Measure the speed of this machine, and fit the factors with which the times of a policy are predicted."""
