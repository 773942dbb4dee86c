"""ResNets with two convolutions per block (He et al. 2016), up to their last feature map.

A trained batch norm is an affine map, so a converter folds each batch norm into the convolution before it
(:func:`folded`). Group norms are not folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.norm import GroupNorm
from sinew.layers.sizes import check_sizes

STRIDE = 32  # side in pixels of the frame's area that one feature of the last map covers
NORM_EPS = 1e-5  # default of torchvision
# Number of blocks per stage, by torchvision's name.
LAYERS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
MAX_BLOCKS = 64
# A float32 convolution of single pixels on a CPU is computed as a product over the pixels if a picture has at most
# FEW_PIXELS of them. PyTorch's convolution multiplies in the other order. With 1152 channels it takes four times as
# long for 3 x 3 pixels, and as long as the product for 6 x 6 pixels (research/log/2026-11-30.md). A single pixel is
# quicker as a convolution.
FEW_PIXELS = 16


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a ResNet.

    Attributes:
        blocks: Number of blocks of each of the four stages.
        width: Channels of the first stage. Each stage has twice the channels of the stage before.
        group: Channels in each group of the group norms. 0 means that batch norms are folded into the convolutions.
    """

    blocks: tuple[int, ...]
    width: int = 64
    group: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)
        if len(self.blocks) != 4 or not all(1 <= count <= MAX_BLOCKS for count in self.blocks):
            raise ValueError(f"blocks: expected four numbers from 1 to {MAX_BLOCKS}, got {list(self.blocks)}")
        if self.group and self.width % self.group:
            raise ValueError(f"width: expected a multiple of group {self.group}, got {self.width}")

    @property
    def out_channels(self) -> int:
        """Return the number of channels of the last feature map."""
        return 8 * self.width

    @staticmethod
    def grid(height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last feature map of a picture. Height and width are in pixels."""
        return -(-height // STRIDE), -(-width // STRIDE)


class Conv(nn.Conv2d):
    """A convolution with "same" padding in the precision of its weight. Its output size is the input size divided by
    the stride.

    Args:
        in_channels: Input channels.
        out_channels: Output channels.
        kernel: Side of the kernel.
        stride: Stride.
        bias: True adds a bias.
        groups: Groups of channels. An output channel reads only the input channels of its own group.
    """

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
        x = x.to(self.weight.dtype)
        if not self._multiplies_rows(x):
            return super().forward(x)
        rows = F.linear(x.flatten(2).transpose(1, 2), self.weight.flatten(1), self.bias)
        return rows.transpose(1, 2).unflatten(2, x.shape[2:])

    def _multiplies_rows(self, x: Tensor) -> bool:
        single = self.kernel_size == (1, 1) and self.stride == (1, 1) and self.groups == 1
        if not single or x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return False
        return 1 < x.shape[2] * x.shape[3] <= FEW_PIXELS


def norm(channels: int, group: int) -> nn.Module:
    """Return the group norm after a convolution, or an identity if the norm is folded into the convolution (group
    0).
    """
    return GroupNorm(channels // group, channels, eps=NORM_EPS) if group else nn.Identity()


class BasicBlock(nn.Module):
    """A residual block: two convolutions with norms, whose result is added to the block's input."""

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
    """A ResNet up to its last feature map."""

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
    """Fold a frozen batch norm into the convolution before it.

    Args:
        weight: Weight of the convolution, [C', C, k, k].
        scale: Weight of the batch norm.
        shift: Bias of the batch norm.
        mean: Running mean of the batch norm.
        variance: Running variance of the batch norm.
        eps: Epsilon of the batch norm.

    Returns:
        Weight and bias of one equivalent convolution, float64.
    """
    gain = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + eps)
    return weight * gain[:, None, None, None], shift - mean * gain
