"""Residual networks of two convolutions a block (He et al. 2016), up to their last feature map.

Batch norms are affine once they are trained, so a converter folds each into the convolution before it
(:func:`folded`). Norms over groups of channels are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.norm import GroupNorm
from sinew.layers.sizes import check_sizes

STRIDE = 32  # pixels of a frame along each side of a feature
NORM_EPS = 1e-5  # torchvision's
LAYERS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}  # blocks of each stage, by torchvision's name
MAX_BLOCKS = 64


@dataclass(frozen=True)
class ResNetConfig:
    """``width``: channels of the first stage; each stage is twice as wide as the one before. ``blocks``: of each.
    ``group``: channels of each group of the norms; 0: norms are folded.
    """

    blocks: tuple[int, ...]
    width: int = 64
    group: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)
        if len(self.blocks) != 4 or not all(1 <= count <= MAX_BLOCKS for count in self.blocks):
            raise ValueError(f"blocks: expected four numbers from 1 to {MAX_BLOCKS}, got {list(self.blocks)}")
        if self.group and self.width % self.group:
            raise ValueError(f"width {self.width}: expected a multiple of the groups' {self.group} channels")

    @property
    def out_channels(self) -> int:
        """Return the channels of the last feature map."""
        return 8 * self.width

    @staticmethod
    def grid(height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last feature map of a picture of this size."""
        return -(-height // STRIDE), -(-width // STRIDE)


class Conv(nn.Conv2d):
    """A convolution in the precision of its weight, which keeps the size but for its stride. groups: of channels that
    see each other alone."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        bias: bool = True,
        groups: int = 1,
    ):
        super().__init__(
            in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=bias, groups=groups
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def norm(channels: int, group: int) -> nn.Module:
    """Return the norm behind a convolution; where it is folded into that, nothing."""
    return GroupNorm(channels // group, channels, eps=NORM_EPS) if group else nn.Identity()


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int, group: int):
        super().__init__()
        bias, same = not group, stride == 1 and in_channels == out_channels
        self.conv1 = Conv(in_channels, out_channels, 3, stride, bias)
        self.norm1 = norm(out_channels, group)
        self.conv2 = Conv(out_channels, out_channels, 3, 1, bias)
        self.norm2 = norm(out_channels, group)
        self.shortcut: nn.Module = nn.Identity() if same else Conv(in_channels, out_channels, 1, stride, bias)
        self.shortcut_norm = nn.Identity() if same else norm(out_channels, group)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, h, w] -> [B, C', ceil(h / stride), ceil(w / stride)]
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut_norm(self.shortcut(x)))


class ResNet(nn.Module):
    stages: Sequence[nn.Sequential]

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.stem = Conv(3, config.width, 7, 2, not config.group)
        self.stem_norm = norm(config.width, config.group)
        stages, before = [], config.width
        for stage, count in enumerate(config.blocks):
            width = config.width * 2**stage
            first = BasicBlock(before, width, 1 if stage == 0 else 2, config.group)
            stages.append(
                nn.Sequential(first, *(BasicBlock(width, width, 1, config.group) for _ in range(count - 1)))
            )
            before = width
        self.stages = nn.ModuleList(stages)  # type: ignore[assignment]

    def begin(self, pixels: Tensor) -> Tensor:  # [B, 3, h, w] -> [B, width, ceil(h / 4), ceil(w / 4)]
        return F.max_pool2d(F.relu(self.stem_norm(self.stem(pixels))), 3, 2, 1)

    def forward(self, pixels: Tensor) -> Tensor:  # [B, 3, h, w] -> [B, C, ceil(h / 32), ceil(w / 32)]
        x = self.begin(pixels)
        for stage in self.stages:
            x = stage(x)
        return x


def folded(
    weight: np.ndarray,
    scale: np.ndarray,
    shift: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    eps: float = NORM_EPS,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight and bias, float64, of a convolution [C', C, k, k] and the frozen batch norm behind it as one."""
    gain = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + eps)
    return weight * gain[:, None, None, None], shift - mean * gain
