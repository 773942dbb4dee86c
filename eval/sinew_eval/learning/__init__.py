"""What policy gradients need of a policy: drawn actions, their log-probabilities, weights that are exchanged."""
