"""DINOv3's vision transformer (Simeoni et al. 2025, arXiv 2508.10104) without its final norm, and a projection of
patches.

TurboVLA reads the features before the final norm.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.rope import Rotation
from sinew.layers.vit import ViTConfig, ViTLayer

NORM_EPS = 1e-5  # default of torch; the reference implementation uses the default too


def patch_rotation(
    rows: int, cols: int, first: int, head_dim: int, theta: float, device: torch.device
) -> Rotation:
    """Return the rotary embedding of the tokens of the vision tower.

    The centre of each patch has coordinates from -1 to 1. Each dimension in the first half of a head forms a pair
    with one in the second half. One half of the pairs is rotated by the row, the other half by the column. The order
    of operations is that of transformers' ``DINOv3ViTRopePositionEmbedding``, in float32.

    Args:
        rows: Rows of patches.
        cols: Columns of patches.
        first: Number of tokens before the patches. They have no position and are not rotated.
        head_dim: Width of a head.
        theta: Base of the periods.
        device: Device of the tables.

    Returns:
        Tables [1, first + rows * cols, 1, head_dim / 2].
    """
    exponent = torch.arange(0, 1, 4 / head_dim, dtype=torch.float32, device=device)
    frequency = 1 / theta**exponent  # [head_dim / 4]
    axes = []
    for count in (rows, cols):
        centre = torch.arange(0.5, count, dtype=torch.float32, device=device) / count
        axes.append(2.0 * centre - 1.0)
    where = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)  # [rows * cols, 2]
    angle = (2 * math.pi * where[:, :, None] * frequency).flatten(1)  # [rows * cols, head_dim / 2]
    angle = F.pad(angle, (0, 0, first, 0))[None, :, None]  # an angle of 0 does not rotate
    return Rotation(angle.cos(), angle.sin())


class DINOv3(nn.Module):
    """DINOv3, which returns one feature per patch. The class token and the registers take part in attention only."""

    def __init__(self, config: ViTConfig, theta: float):
        super().__init__()
        self.config, self.theta = config, theta
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, stride=config.patch_size)
        self.prefix = nn.Parameter(torch.zeros(config.prefix_tokens, config.hidden_size))
        self.layers = nn.ModuleList(ViTLayer(config) for _ in range(config.num_layers))

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, height, width] to features [B, patches, C] in row-major order.

        Height and width are multiples of the patch size.
        """
        config = self.config
        rows, cols = config.grid(*pixels.shape[-2:])
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2)
        x = torch.cat([self.prefix.expand(patches.shape[0], -1, -1), patches.transpose(1, 2)], dim=1)
        head_dim = config.hidden_size // config.num_heads
        rotate = patch_rotation(rows, cols, config.prefix_tokens, head_dim, self.theta, x.device)
        for layer in self.layers:
            x = layer(x, rotate)
        return x[:, config.prefix_tokens :]


class PatchProjection(nn.Module):
    """The projection norm(skip(x) + fc2(gelu(fc1(norm(x)))))."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int):
        super().__init__()
        self.input_norm = LayerNorm(in_size, eps=NORM_EPS)
        self.fc1 = Linear(in_size, hidden_size)
        self.fc2 = Linear(hidden_size, out_size)
        self.skip = Linear(in_size, out_size, bias=False)
        self.output_norm = LayerNorm(out_size, eps=NORM_EPS)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "input_norm", (self.fc1,))]

    def forward(self, x: Tensor) -> Tensor:  # input shape [..., in_size], output shape [..., out_size]
        return self.output_norm(self.skip(x) + self.fc2(F.gelu(self.fc1(self.input_norm(x)))))
