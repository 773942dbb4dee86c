"""pi0 and pi0.5 in openpi's checkpoint layout (JAX and PyTorch), and the robots of openpi's training configurations."""
