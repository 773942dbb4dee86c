"""The single-pass action head of OpenVLA-OFT (Kim et al. 2025, arXiv 2502.19645): hidden states in, actions out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.linear import Linear
from sinew.layers.norm import LayerNorm

EPS = 1e-5  # torch's default, which the reference leaves as it is


class ResidualBlock(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm = LayerNorm(size, eps=EPS)
        self.proj = Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.proj(self.norm(x)))


class RegressionHead(nn.Module):
    """An MLP with residual blocks, from each step's hidden states to its action (upstream's ``MLPResNet``)."""

    def __init__(self, input_size: int, hidden_size: int, output_size: int, num_blocks: int = 2):
        super().__init__()
        self.norm_in = LayerNorm(input_size, eps=EPS)
        self.proj_in = Linear(input_size, hidden_size)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(num_blocks))
        self.norm_out = LayerNorm(hidden_size, eps=EPS)
        self.proj_out = Linear(hidden_size, output_size)

    def forward(self, x: Tensor) -> Tensor:  # [B, H, input] -> [B, H, output]
        x = F.relu(self.proj_in(self.norm_in(x)))
        for block in self.blocks:
            x = block(x)
        return self.proj_out(self.norm_out(x))
