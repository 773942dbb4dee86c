"""Qwen2.5-VL's vision tower: rotary positions, gated MLPs, and windowed attention in most blocks.

Patches are in block order from the start: the four patches that are merged into one token are neighbours, and
merged tokens are in row-major order. A window is a square of merged tokens, cut at the right and bottom edges
of the picture. The reference implementation sorts patches by window. This implementation uses an attention
mask with the same result.
Source: transformers ``modeling_qwen2_5_vl.py`` (``Qwen2_5_VisionTransformerPretrainedModel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.attention import attend
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.norm import RMSNorm
from sinew.layers.qwen_vit import block_order, embed_patches, grid_positions, grid_rotation
from sinew.layers.rope import Rotation
from sinew.layers.vit import BlockConfig, ViTAttention

NORM_EPS = 1e-6  # a constant in Qwen2.5-VL's code
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Qwen25ViTConfig(BlockConfig):
    """Sizes of Qwen2.5-VL's vision tower.

    Attributes:
        patch_size: Side of a patch in pixels.
        merge: Number of patches along a side of one token.
        temporal_patch: Number of copies of a still picture in a patch.
        window: Number of tokens along a side of a window.
        whole: Indices of the blocks whose patches attend to the whole picture.
        output_size: Width of a token.
    """

    patch_size: int
    merge: int
    temporal_patch: int
    window: int
    whole: tuple[int, ...]
    output_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"vision: hidden_size: expected a multiple of {4 * self.num_heads}, four times the number of heads, got"
                f" {self.hidden_size}"
            )
        if any(not 0 <= block < self.num_layers for block in self.whole):
            raise ValueError(
                f"vision: whole: expected block indices below {self.num_layers}, got {self.whole}"
            )

    @property
    def unit(self) -> int:
        """Return the side of a merged token in pixels."""
        return self.patch_size * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of a picture. Height and width are in pixels."""
        return height // self.patch_size, width // self.patch_size


class GatedViTMLP(nn.Module):
    """The gated MLP down(silu(gate(x)) * up(x)), with biases."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def inputs(self) -> tuple[nn.Module, ...]:
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen25Layer(nn.Module):
    """A block of the vision tower: attention and gated MLP, each preceded by a norm."""

    def __init__(self, config: Qwen25ViTConfig):
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS)
        self.attn = ViTAttention(config.block(NORM_EPS, "gelu"))
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = GatedViTMLP(config)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm1", (self.attn,)), FoldSite(self, "norm2", (self.mlp,))]

    def inside(self, x: Tensor, rotate: Rotation, mask: Tensor) -> Tensor:
        """Compute the attention inside windows.

        Args:
            x: [B, L, C].
            rotate: Rotary positions.
            mask: bool [B, L, L], True for two patches of one window.

        Returns:
            [B, L, C].
        """
        q, k, v = (part.unflatten(-1, (-1, self.attn.head_dim)) for part in self.attn.project(x))
        return self.attn.o_proj(attend(rotate(q), rotate(k), v, mask))

    def forward(self, x: Tensor, rotate: Rotation, mask: Tensor | None) -> Tensor:
        """Run the block. ``mask`` is the mask of the windows, or None if patches attend to the whole picture."""
        h = self.norm1(x)
        x = x + (self.attn(h, rotate) if mask is None else self.inside(h, rotate, mask))
        return x + self.mlp(self.norm2(x))


class Qwen25Merger(nn.Module):
    """Merge four neighbouring patches into one token."""

    def __init__(self, config: Qwen25ViTConfig):
        super().__init__()
        self.area = config.merge**2
        size = config.hidden_size * self.area
        self.norm = RMSNorm(config.hidden_size, NORM_EPS)
        self.fc1 = Linear(size, size)
        self.fc2 = Linear(size, config.output_size)

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C] in block order -> [B, L / merge^2, output_size]
        groups = self.norm(x).unflatten(1, (-1, self.area)).flatten(2)
        return self.fc2(F.gelu(self.fc1(groups)))


class Qwen25ViT(nn.Module):
    """Qwen2.5-VL's vision tower."""

    layers: Sequence[Qwen25Layer]

    def __init__(self, config: Qwen25ViTConfig):
        super().__init__()
        self.config = config
        channels, patch = 3 * config.temporal_patch, config.patch_size
        self.patch_embedding = nn.Conv2d(channels, config.hidden_size, patch, stride=patch, bias=False)
        self.layers = nn.ModuleList(Qwen25Layer(config) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.merger = Qwen25Merger(config)

    def forward(self, pixels: Tensor) -> Tensor:  # [B, 3, height, width] -> [B, tokens, output_size]
        # The weight's input channels are ordered by colour, then by frame.
        frames = pixels.to(self.patch_embedding.weight.dtype).repeat_interleave(
            self.config.temporal_patch, dim=1
        )
        patches = embed_patches(self.patch_embedding, frames)  # [B, rows, cols, C]
        rows, cols = patches.shape[1:3]
        config, x = self.config, block_order(patches.flatten(1, 2), rows, cols, self.config.merge)
        head_dim = config.hidden_size // config.num_heads
        rotate = grid_rotation(rows, cols, config.merge, head_dim, ROPE_THETA, x.device)
        mask = self.windows(rows, cols, x.device).expand(x.shape[0], -1, -1)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate, None if index in config.whole else mask)
        return self.merger(x)

    def windows(self, rows: int, cols: int, device: torch.device) -> Tensor:
        """Return the attention mask of the windows, bool [1, L, L].

        It is True for two patches (in block order) of one window.
        """
        where = grid_positions(rows, cols, self.config.merge, device) // (
            self.config.window * self.config.merge
        )
        return (where[:, None] == where[None]).all(dim=-1)[None]
