"""The reference engine: the model as it is written, under PyTorch."""
