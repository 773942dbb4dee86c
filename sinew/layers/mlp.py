"""Plain multi-layer perceptrons, for example to project image features to the width of a language model."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.linear import Linear


class MLP(nn.Module):
    """Linear layers from each size to the next, with an exact GELU between the layers."""

    def __init__(self, *sizes: int):
        super().__init__()
        self.layers = nn.ModuleList(Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:  # [..., sizes[0]] -> [..., sizes[-1]]
        for index, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if index else x)
        return x


class Projector(nn.Module):
    """The MLP fc2(relu(fc1(x))). GR00T and Evo-1 use it to encode the state and to decode actions."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int):
        super().__init__()
        self.fc1 = Linear(in_size, hidden_size)
        self.fc2 = Linear(hidden_size, out_size)

    def forward(self, x: Tensor) -> Tensor:  # [..., in_size] -> [..., out_size]
        return self.fc2(F.relu(self.fc1(x)))
