"""Spatial softmax (Finn et al. 2016): the places of so many features in a map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sinew.layers.linear import Linear


class Keypoints(nn.Module):
    """``places``: [rows * cols, 2], x and y of each position of a map, from -1 to 1."""

    def __init__(self, channels: int, count: int, rows: int, cols: int):
        super().__init__()
        self.maps = Linear(channels, count)
        self.register_buffer("places", torch.zeros(rows * cols, 2))

    def forward(self, features: Tensor) -> Tensor:  # [B, C, rows, cols] -> [B, count, 2]
        maps = self.maps(features.flatten(2).transpose(1, 2)).transpose(1, 2)  # [B, count, rows * cols]
        return maps.float().softmax(dim=-1) @ self.places.float()  # type: ignore[operator]
