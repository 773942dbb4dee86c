"""Residual networks of two convolutions a block (He et al. 2016), up to their last feature map.

Frozen batch norms are affine, so a converter folds each into the convolution before it (:func:`folded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.sizes import check_sizes

STRIDE = 32  # pixels of a frame along each side of a feature
NORM_EPS = 1e-5  # torchvision's
LAYERS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}  # blocks of each stage, by torchvision's name
MAX_BLOCKS = 64


@dataclass(frozen=True)
class ResNetConfig:
    """``width``: channels of the first stage; each stage is twice as wide as the one before. ``blocks``: of each."""

    blocks: tuple[int, ...]
    width: int = 64

    def __post_init__(self) -> None:
        check_sizes(self)
        if len(self.blocks) != 4 or not all(1 <= count <= MAX_BLOCKS for count in self.blocks):
            raise ValueError(f"blocks: expected four numbers from 1 to {MAX_BLOCKS}, got {list(self.blocks)}")

    @property
    def out_channels(self) -> int:
        """Return the channels of the last feature map."""
        return 8 * self.width

    @staticmethod
    def grid(height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last feature map of a picture of this size."""
        return -(-height // STRIDE), -(-width // STRIDE)


class Conv(nn.Conv2d):
    """A convolution in the precision of its weight, which keeps the size but for its stride."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1):
        super().__init__(in_channels, out_channels, kernel, stride, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        self.conv1 = Conv(in_channels, out_channels, 3, stride)
        self.conv2 = Conv(out_channels, out_channels, 3)
        same = stride == 1 and in_channels == out_channels
        self.shortcut: nn.Module = nn.Identity() if same else Conv(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, h, w] -> [B, C', ceil(h / stride), ceil(w / stride)]
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class ResNet(nn.Module):
    stages: Sequence[nn.Sequential]

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.stem = Conv(3, config.width, 7, 2)
        stages, before = [], config.width
        for stage, count in enumerate(config.blocks):
            width = config.width * 2**stage
            first = Block(before, width, 1 if stage == 0 else 2)
            stages.append(nn.Sequential(first, *(Block(width, width, 1) for _ in range(count - 1))))
            before = width
        self.stages = nn.ModuleList(stages)  # type: ignore[assignment]

    def forward(self, pixels: Tensor) -> Tensor:  # [B, 3, h, w] -> [B, C, ceil(h / 32), ceil(w / 32)]
        x = F.max_pool2d(F.relu(self.stem(pixels)), 3, 2, 1)  # [B, width, h / 4, w / 4]
        for stage in self.stages:
            x = stage(x)
        return x


def folded(
    weight: np.ndarray, scale: np.ndarray, shift: np.ndarray, mean: np.ndarray, variance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight and bias, float64, of a convolution [C', C, k, k] and the frozen batch norm behind it as one."""
    gain = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + NORM_EPS)
    return weight * gain[:, None, None, None], shift - mean * gain
