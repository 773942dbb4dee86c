"""DaViT (Ding et al. 2022, arXiv 2204.03645), the vision tower of Florence-2.

Each block has attention of patches within windows, followed by attention of channels within groups. Each stage has
fewer and wider patches than the stage before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.resnet import Conv
from sinew.layers.sizes import MAX_LAYERS, MAX_WIDTH, check_sizes
from sinew.layers.vit import ViTAttention, ViTConfig, ViTMLP

NORM_EPS = 1e-5  # default of torch; the reference implementation uses the default too
MLP_RATIO = 4


@dataclass(frozen=True)
class DaViTConfig:
    """Sizes of a DaViT tower. Each tuple has one entry per stage.

    Attributes:
        widths: Width of a patch.
        depths: Number of pairs of blocks.
        num_heads: Number of attention heads.
        num_groups: Number of channel groups.
        kernels: Kernel of the convolution at the start of the stage, in pixels of the stage before.
        strides: Stride of this convolution.
        norms_first: True if the norm is before this convolution, False if it is after.
        window_size: Patches along a side of a window.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    num_groups: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    norms_first: tuple[bool, ...]
    window_size: int

    def __post_init__(self) -> None:
        check_sizes(self)
        each = (self.depths, self.num_heads, self.num_groups, self.kernels, self.strides, self.norms_first)
        if not self.widths or any(len(field) != len(self.widths) for field in each):
            raise ValueError(
                f"vision: expected one entry for each of the {len(self.widths)} stages in every field"
            )
        if not all(1 <= depth <= MAX_LAYERS for depth in self.depths) or not all(
            1 <= width <= MAX_WIDTH for width in self.widths
        ):
            raise ValueError(
                f"vision: expected widths from 1 to {MAX_WIDTH} and depths from 1 to {MAX_LAYERS}"
            )
        for width, heads, groups in zip(self.widths, self.num_heads, self.num_groups, strict=True):
            if heads < 1 or groups < 1 or width % heads or width % groups:
                raise ValueError(
                    f"vision: expected heads and groups that divide the width {width}, got {heads}, {groups}"
                )
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            if not (1 <= stride <= kernel <= MAX_LAYERS and kernel % 2):
                raise ValueError(
                    f"vision: expected an odd kernel and a stride of at most the kernel, got {kernel}, {stride}"
                )

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last stage's patches. Height and width of the picture are in pixels."""
        for stride in self.strides:
            height, width = -(-height // stride), -(-width // stride)
        return height, width

    def block(self, stage: int) -> ViTConfig:
        """Return the sizes of the blocks of a stage, as the configuration of a vision transformer that reads one
        window."""
        width = self.widths[stage]
        return ViTConfig(
            hidden_size=width,
            intermediate_size=MLP_RATIO * width,
            num_layers=1,
            num_heads=self.num_heads[stage],
            image_size=self.window_size,
            patch_size=1,
            norm_eps=NORM_EPS,
            activation="gelu",
        )


class ChannelAttention(nn.Module):
    """Attention between channels: each channel attends to the channels of its group, over all patches."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.groups = groups
        self.qkv = Linear(width, 3 * width)
        self.o_proj = Linear(width, width)

    def inputs(self) -> tuple[nn.Module, ...]:
        return (self.qkv,)

    def forward(self, x: Tensor) -> Tensor:  # [B, L, C]
        q, k, v = (
            part.unflatten(-1, (self.groups, -1)).permute(0, 2, 3, 1) for part in self.qkv(x).chunk(3, -1)
        )
        scores = (q.float() @ k.float().transpose(-1, -2)) * x.shape[1] ** -0.5  # [B, G, C / G, C / G]
        out = scores.softmax(dim=-1).to(v.dtype) @ v  # [B, G, C / G, L]
        return self.o_proj(out.permute(0, 3, 1, 2).flatten(2))


class DaViTBlock(nn.Module):
    """Attention and MLP, each after a norm. A depthwise convolution comes before each norm."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        width = config.hidden_size
        self.conv1 = Conv(width, width, 3, groups=width)
        self.norm1 = LayerNorm(width, eps=config.norm_eps)
        self.conv2 = Conv(width, width, 3, groups=width)
        self.norm2 = LayerNorm(width, eps=config.norm_eps)
        self.mlp = ViTMLP(config)

    def mix(self, x: Tensor, rows: int, cols: int) -> Tensor:  # [B, rows * cols, C]
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:  # [B, C, rows, cols]
        size = x.shape[2:]
        x = (x + self.conv1(x)).flatten(2).transpose(1, 2)
        x = x + self.mix(self.norm1(x), *size)
        x = x.transpose(1, 2).unflatten(2, size)
        x = (x + self.conv2(x)).flatten(2).transpose(1, 2)
        x = x + self.mlp(self.norm2(x))
        return x.transpose(1, 2).unflatten(2, size)


class SpatialBlock(DaViTBlock):
    """A block in which patches attend to the patches of their window.

    A window over the edge is padded with zeros after the norm. The projections map these zeros to their biases, which
    take part in the attention. The norm's scale must therefore not be merged into the weights of the projections.
    """

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.window = config.image_size
        self.attn = ViTAttention(config)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm2", (self.mlp,))]

    def mix(self, x: Tensor, rows: int, cols: int) -> Tensor:
        side, down, across = self.window, -(-rows // self.window), -(-cols // self.window)
        parts = torch.cat(self.attn.project(x), dim=-1).unflatten(1, (rows, cols))
        if (down * side, across * side) != (rows, cols):
            edge = torch.cat(self.attn.project(torch.zeros_like(x[:1, :1])), dim=-1)  # [1, 1, 3 * C]
            parts = filled(filled(parts, 1, down * side, edge), 2, across * side, edge)
        parts = parts.unflatten(2, (across, side)).unflatten(1, (down, side)).transpose(2, 3)
        q, k, v = parts.flatten(3, 4).flatten(0, 2).chunk(3, dim=-1)  # [B * windows, side * side, C] each
        x = self.attn.attend(q, k, v).unflatten(1, (side, side)).unflatten(0, (-1, down, across))
        x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :rows, :cols]
        return self.attn.o_proj(x.flatten(1, 2))


def filled(x: Tensor, axis: int, size: int, row: Tensor) -> Tensor:
    """Pad an axis of x [B, rows, cols, C] to ``size`` with copies of ``row``, [1, 1, C]."""
    shape = list(x.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([x, row.expand(shape)], dim=axis)


class ChannelBlock(DaViTBlock):
    """A block in which channels attend to the channels of their group."""

    def __init__(self, config: ViTConfig, groups: int):
        super().__init__(config)
        self.attn = ChannelAttention(config.hidden_size, groups)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm1", (self.attn,)), FoldSite(self, "norm2", (self.mlp,))]

    def mix(self, x: Tensor, rows: int, cols: int) -> Tensor:
        return self.attn(x)


class DaViTStage(nn.Module):
    """A stage: a convolution that makes fewer and wider patches, followed by pairs of blocks."""

    def __init__(self, config: DaViTConfig, stage: int):
        super().__init__()
        before = config.widths[stage - 1] if stage else 3
        block, width = config.block(stage), config.widths[stage]
        self.norm_first = config.norms_first[stage]
        self.norm = LayerNorm(before if self.norm_first else width, eps=NORM_EPS)
        self.conv = Conv(before, width, config.kernels[stage], config.strides[stage])
        self.blocks = nn.ModuleList(
            nn.Sequential(SpatialBlock(block), ChannelBlock(block, config.num_groups[stage]))
            for _ in range(config.depths[stage])
        )

    def begin(self, x: Tensor) -> Tensor:  # shapes: [B, C, rows, cols] -> [B, C', fewer rows, fewer cols]
        if self.norm_first:
            return self.conv(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return x


class DaViT(nn.Module):
    """The vision tower DaViT: a sequence of stages, each with fewer and wider patches than the stage before."""

    stages: Sequence[DaViTStage]

    def __init__(self, config: DaViTConfig):
        super().__init__()
        self.stages = nn.ModuleList(DaViTStage(config, stage) for stage in range(len(config.widths)))  # type: ignore[assignment]

    def forward(self, pixels: Tensor) -> Tensor:  # [B, 3, h, w] -> [B, rows * cols, C] in row-major order
        x = pixels
        for stage in self.stages:
            x = stage(x)
        return x.flatten(2).transpose(1, 2)
