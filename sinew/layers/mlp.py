"""A plain multi-layer perceptron: projectors between modalities."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.linear import Linear


class MLP(nn.Module):
    """Linear layers from each size to the next, with an exact GELU between them."""

    def __init__(self, *sizes: int):
        super().__init__()
        self.layers = nn.ModuleList(Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:  # [..., sizes[0]] -> [..., sizes[-1]]
        for index, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if index else x)
        return x
