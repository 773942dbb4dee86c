"""openpi's own layout of pi0 and pi0.5: checkpoints of JAX and PyTorch, and the robots of its configurations."""
