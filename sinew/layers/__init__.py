"""The building blocks of models. Letters in shapes: B batch, L length, H heads, D head size, C channels."""
