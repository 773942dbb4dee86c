"""Connectors, which convert features of a vision tower to input tokens of a language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.norm import LayerNorm


def pixel_shuffle(x: Tensor, rows: int, cols: int, scale: int) -> Tensor:
    """Fold each ``scale * scale`` square of patches into one token, in SmolVLM's order.

    Inside a token the rows of the square are the slowest axis and the channels are the fastest axis.

    Args:
        x: [B, rows * cols, C].
        rows: Rows of patches.
        cols: Columns of patches.
        scale: Patches along a side of a square.

    Returns:
        [B, rows * cols / scale^2, scale^2 * C].
    """
    B, _, C = x.shape
    x = x.view(B, rows // scale, scale, cols // scale, scale, C)
    return x.transpose(2, 3).reshape(B, (rows // scale) * (cols // scale), scale * scale * C)


class PixelShuffleConnector(nn.Module):
    """SmolVLM's connector: squares of patches are folded into tokens, which one linear layer projects."""

    def __init__(self, vision_size: int, language_size: int, scale: int):
        super().__init__()
        self.scale = scale
        self.proj = Linear(vision_size * scale**2, language_size, bias=False)

    def inputs(self) -> tuple[nn.Module, ...]:
        return (self.proj,)

    def forward(self, x: Tensor, rows: int, cols: int) -> Tensor:  # [B, rows * cols, C] -> [B, tokens, C']
        return self.proj(pixel_shuffle(x, rows, cols, self.scale))


class UnshuffleConnector(nn.Module):
    """Eagle 2's connector: squares of patches are folded into tokens, followed by a norm and two layers with a GELU.

    Inside a token the channels are the slowest axis (order of ``torch.nn.functional.pixel_unshuffle``).
    """

    def __init__(self, vision_size: int, language_size: int, scale: int):
        super().__init__()
        self.scale = scale
        self.norm = LayerNorm(vision_size * scale**2, eps=1e-5)
        self.fc1 = Linear(vision_size * scale**2, language_size)
        self.fc2 = Linear(language_size, language_size)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm", (self.fc1,))]

    def forward(self, x: Tensor, rows: int, cols: int) -> Tensor:  # [B, rows * cols, C] -> [B, tokens, C']
        grid = x.transpose(1, 2).unflatten(2, (rows, cols))  # [B, C, rows, cols]
        squares = F.pixel_unshuffle(grid, self.scale).flatten(2).transpose(1, 2)  # [B, tokens, scale^2 * C]
        return self.fc2(F.gelu(self.fc1(self.norm(squares))))
