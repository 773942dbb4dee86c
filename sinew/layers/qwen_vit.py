"""Qwen3-VL's vision tower: rotary positions, 2 x 2 merging of patches, and features for the language model.

Patches are in block order from the start: the four patches of a merged token are adjacent, and merged tokens are in
row-major order. Every patch attends to every patch of its own view. The features after some layers ("deepstack") are
merged as well, and are added to the image tokens in the first layers of the language model.
Source: transformers ``modeling_qwen3_vl.py`` (``Qwen3VLVisionModel``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding, Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.rope import Rotation
from sinew.layers.sizes import check_sizes
from sinew.layers.vit import ViTConfig, ViTLayer


@dataclass(frozen=True)
class QwenViTConfig:
    """Sizes of Qwen3-VL's vision tower.

    Attributes:
        blocks: Sizes of the transformer blocks.
        output_size: Width of a merged token.
        merge: Number of patches along a side of one token.
        temporal_patch: Number of copies of a still image in a patch.
        taps: Indices of the layers whose features are also passed to the language model ("deepstack").
        rope_theta: Base of the rotary frequencies.
    """

    blocks: ViTConfig
    output_size: int
    merge: int
    temporal_patch: int
    taps: tuple[int, ...]
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.blocks.hidden_size % (4 * self.blocks.num_heads):
            raise ValueError(
                f"vision: hidden_size: expected a multiple of {4 * self.blocks.num_heads}, four times the number of"
                f" heads, got {self.blocks.hidden_size}"
            )
        if any(not 0 <= tap < self.blocks.num_layers for tap in self.taps):
            raise ValueError(
                f"vision: taps: expected indices below {self.blocks.num_layers}, the number of layers, got {self.taps}"
            )

    @property
    def head_dim(self) -> int:
        return self.blocks.hidden_size // self.blocks.num_heads

    @property
    def patch_size(self) -> int:
        """Return the side of a patch in pixels."""
        return self.blocks.patch_size

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of a picture. Height and width are in pixels."""
        return self.blocks.grid(height, width)


def block_order(x: Tensor, rows: int, cols: int, merge: int) -> Tensor:
    """Reorder patches [..., rows * cols, C] from row-major order to blocks of merge x merge patches.

    The blocks and the patches inside a block are in row-major order.
    """
    shape = x.shape
    x = x.reshape(*shape[:-2], rows // merge, merge, cols // merge, merge, shape[-1])
    return x.transpose(-4, -3).reshape(shape)


def grid_positions(rows: int, cols: int, merge: int, device: torch.device) -> Tensor:
    """Return row and column of every patch in block order, int64 [rows * cols, 2]."""
    sides = (torch.arange(side, device=device) for side in (rows, cols))
    row, col = torch.meshgrid(*sides, indexing="ij")
    return block_order(torch.stack([row, col], dim=-1).flatten(0, 1), rows, cols, merge)


def grid_rotation(
    rows: int, cols: int, merge: int, head_dim: int, theta: float, device: torch.device
) -> Rotation:
    """Return the rotary embedding of patches in block order (the patches of one merged token are neighbours).

    Element i of the first half of a head and element i of the second half form a pair. Half of the pairs
    rotate with the row of a patch, and the other half with its column. Tables are [1, rows * cols, 1,
    head_dim / 2].
    """
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    frequency = 1.0 / theta**exponent  # [head_dim / 4]
    where = grid_positions(rows, cols, merge, device)
    angle = (where[..., None].float() * frequency).flatten(-2)[None, :, None]  # [1, L, 1, head_dim / 2]
    return Rotation(angle.cos(), angle.sin())


class PatchMerger(nn.Module):
    """Merges four neighbouring patches into one token.

    Args:
        config: Sizes of the vision tower.
        joined: True if the norm's statistics are over the four patches together, False if they are over each
            single patch.
    """

    def __init__(self, config: QwenViTConfig, joined: bool):
        super().__init__()
        width, eps = config.blocks.hidden_size, config.blocks.norm_eps
        size = width * config.merge**2
        self.joined, self.merge = joined, config.merge
        self.norm = LayerNorm(size if joined else width, eps=eps)
        self.fc1 = Linear(size, size)
        self.fc2 = Linear(size, config.output_size)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm", (self.fc1,))]

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C] in block order -> [B, L / merge^2, output_size]
        B, L, C = x.shape
        area = self.merge**2
        x = self.norm(x.reshape(B, L // area, area * C) if self.joined else x)
        return self.fc2(F.gelu(self.fc1(x.reshape(B, L // area, area * C))))


class QwenViT(nn.Module):
    """Qwen3-VL's vision tower."""

    def __init__(self, config: QwenViTConfig):
        super().__init__()
        self.config = config
        blocks = config.blocks
        channels, patch = 3 * config.temporal_patch, blocks.patch_size
        self.patch_embedding = nn.Conv2d(channels, blocks.hidden_size, patch, stride=patch)
        self.position_embedding = Embedding(blocks.side**2, blocks.hidden_size)
        self.layers = nn.ModuleList(ViTLayer(blocks) for _ in range(blocks.num_layers))
        self.merger = PatchMerger(config, joined=False)
        self.tap_mergers = nn.ModuleList(PatchMerger(config, joined=True) for _ in config.taps)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, height, width].

        Returns:
            Merged tokens [B, tokens, (1 + taps) * output_size]. The output of the last layer comes first. The
            features of the layers in ``taps`` follow in order.
        """
        pixels = pixels.to(self.patch_embedding.weight.dtype)
        # The weight's input channels are ordered by colour, then by frame.
        frames = pixels.repeat_interleave(self.config.temporal_patch, dim=1)
        patches = embed_patches(self.patch_embedding, frames)  # [B, rows, cols, C]
        rows, cols = patches.shape[1:3]
        return self.encode(patches.flatten(1, 2), rows, cols)

    def encode(self, x: Tensor, rows: int, cols: int) -> Tensor:
        """Encode embedded patches x [B, rows * cols, C], in row-major order and before positions are added.

        The result has the form that :meth:`forward` returns.
        """
        config = self.config
        x = block_order(x, rows, cols, config.merge) + self.positions(rows, cols)
        rotate = self.rotation(rows, cols)
        tap_features = []
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate)
            if index in config.taps:
                tap_features.append(self.tap_mergers[config.taps.index(index)](x))
        return torch.cat([self.merger(x), *tap_features], dim=-1)

    def rotation(self, rows: int, cols: int) -> Rotation:
        """Return the rotary embedding of the patches of a view with this number of patch rows and columns."""
        config, device = self.config, self.position_embedding.weight.device
        return grid_rotation(rows, cols, config.merge, config.head_dim, config.rope_theta, device)

    def positions(self, rows: int, cols: int) -> Tensor:  # [rows * cols, C] in block order
        """Resize the table of position embeddings bilinearly to the grid of patches, with aligned corners."""
        config, table = self.config, self.position_embedding.weight
        ids, weights = bilinear_rows(rows, cols, config.blocks.side)
        ids, weights = (
            block_order(part, rows, cols, config.merge).to(table.device) for part in (ids, weights)
        )
        return (self.position_embedding(ids) * weights.to(table.dtype)[..., None]).sum(dim=1)


def embed_patches(
    layer: nn.Conv2d, x: Tensor
) -> Tensor:  # [B, channels, height, width] -> [B, rows, cols, C]
    """Compute the convolution of non-overlapping patches as a matrix product.

    oneDNN 3.12 (torch 2.13) computes a wrong bfloat16 convolution on CPUs with AMX if channels times patch side is 64
    or more: the result is unrelated to the exact one. In this tower the product is 96.
    """
    patch = layer.kernel_size[0]
    cut = x.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, channels, rows, patch, cols, patch]
    return F.linear(cut.permute(0, 2, 4, 1, 3, 5).flatten(3), layer.weight.flatten(1), layer.bias)


def bilinear_rows(rows: int, cols: int, side: int) -> tuple[Tensor, Tensor]:
    """Compute the bilinear interpolation of a side x side table of position embeddings.

    Coordinates are float32 ``linspace``, as in the reference implementation. The index is the truncated
    coordinate.

    Returns:
        The four table rows that each patch reads, int64 [rows * cols, 4], and the weights of these rows.
    """
    lows, highs, parts = [], [], []
    for count in (rows, cols):
        at = torch.linspace(0, side - 1, count)
        low = at.long()
        lows.append(low)
        highs.append((low + 1).clamp(max=side - 1))
        parts.append(at - low)
    (r0, c0), (r1, c1), (dr, dc) = lows, highs, parts
    ids = [r[:, None] * side + c[None] for r in (r0, r1) for c in (c0, c1)]
    weights = [y[:, None] * x[None] for y in (1 - dr, dr) for x in (1 - dc, dc)]
    return torch.stack(ids, -1).flatten(0, 1), torch.stack(weights, -1).flatten(0, 1)
