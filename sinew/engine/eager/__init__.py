"""The reference engine, which runs the model's own PyTorch code."""
