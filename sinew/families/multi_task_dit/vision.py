"""CLIP's vision tower (Radford et al. 2021, arXiv 2103.00020), whose class token is the feature of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinew.layers.clip_text import NORM_EPS, QuickMLP
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Embedding
from sinew.layers.norm import LayerNorm
from sinew.layers.qwen_vit import embed_patches
from sinew.layers.vit import BlockConfig, ViTConfig, ViTLayer


@dataclass(frozen=True)
class ClipVisionConfig(BlockConfig):
    """Sizes of CLIP's vision tower.

    Attributes:
        image_size: Side of a picture in pixels.
        patch_size: Side of a patch in pixels. Pixels at the right and the bottom that do not fill a patch are
            ignored.
    """

    image_size: int
    patch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size < self.patch_size:
            raise ValueError(
                f"image_size: expected at least patch_size {self.patch_size}, got {self.image_size}"
            )

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of a picture. Height and width are in pixels."""
        return height // self.patch_size, width // self.patch_size


class QuickLayer(ViTLayer):
    """A block of CLIP's vision tower."""

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.mlp = QuickMLP(config)

    def fold_sites(self) -> list[FoldSite]:
        return super().fold_sites()


class ClipVision(nn.Module):
    """CLIP's vision tower.

    Attributes:
        first: The class token plus its position embedding.
    """

    layers: Sequence[QuickLayer]

    def __init__(self, config: ClipVisionConfig):
        super().__init__()
        size, patch, block = config.hidden_size, config.patch_size, config.block(NORM_EPS, "gelu")
        rows, cols = config.grid(config.image_size, config.image_size)
        self.patch_embedding = nn.Conv2d(3, size, patch, stride=patch, bias=False)
        self.position_embedding = Embedding(rows * cols, size)
        self.first = nn.Parameter(torch.zeros(size))
        self.norm = LayerNorm(size, eps=NORM_EPS)
        self.layers = nn.ModuleList(QuickLayer(block) for _ in range(config.num_layers))  # type: ignore[assignment]

    def embed(self, pixels: Tensor) -> Tensor:  # shapes: [B, 3, h, w] -> [B, 1 + rows * cols, C]
        patch = self.patch_embedding.kernel_size[0]
        rows, cols = pixels.shape[2] // patch, pixels.shape[3] // patch
        whole = pixels[:, :, : rows * patch, : cols * patch].to(self.patch_embedding.weight.dtype)
        patches = self.position_embedding.weight + embed_patches(self.patch_embedding, whole).flatten(1, 2)
        return self.norm(torch.cat([self.first.expand(patches.shape[0], 1, -1), patches], dim=1))

    def forward(self, pixels: Tensor) -> Tensor:  # input shape [B, 3, h, w], output shape [B, C]
        x = self.embed(pixels)
        for layer in self.layers:
            x = layer(x)
        return x[:, 0]
