"""Reinforcement learning with policy gradients: sampled actions, their log-probabilities, and replaceable weights."""
