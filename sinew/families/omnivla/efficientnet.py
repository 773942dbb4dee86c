"""EfficientNet-B0 (Tan and Le 2019, arXiv 1905.11946), up to the mean of its last feature map.

After training, a batch norm only multiplies and adds constants, so a converter merges it into the weights of the
convolution before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.resnet import STRIDE, Conv
from sinew.layers.sizes import check_sizes

DEPTHS = (1, 2, 2, 3, 3, 4, 1)  # blocks per stage, from table 1 of the paper
KERNELS = (3, 3, 5, 3, 5, 5, 3)
STRIDES = (1, 2, 2, 2, 1, 2, 1)  # stride of the first block of each stage
# Factor by which a block increases the channels. The first stage does not increase them.
EXPAND = 6
# A gate first reduces the number of the block's input channels by this factor.
SQUEEZE = 4
NORM_EPS = 1e-3  # epsilon of the batch norms, which the converter merges into the convolutions


@dataclass(frozen=True)
class EfficientNetConfig:
    """Sizes of an EfficientNet.

    Attributes:
        stem: Channels of the first convolution.
        widths: Channels of each stage.
        out_channels: Channels of the features.
    """

    stem: int
    widths: tuple[int, ...]
    out_channels: int

    def __post_init__(self) -> None:
        check_sizes(self)
        if len(self.widths) != len(DEPTHS):
            raise ValueError(
                f"widths: expected {len(DEPTHS)} numbers, one for each stage, got {len(self.widths)}"
            )

    @staticmethod
    def grid(height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last feature map of a picture. Height and width are in pixels."""
        return -(-height // STRIDE), -(-width // STRIDE)


class SameConv(Conv):
    """A convolution with TensorFlow's "SAME" padding, for sides that are multiples of the stride."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(in_channels, out_channels, kernel, stride, groups=groups)
        before = (kernel - stride) // 2
        self.sides = (before, kernel - stride - before) * 2
        self.padding = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.sides))


class Block(nn.Module):
    """An inverted bottleneck with a gate for each channel (squeeze and excitation, Hu et al. 2018)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, expand: int, adds: bool
    ):
        super().__init__()
        inner = in_channels * expand
        self.adds = adds
        self.expand: nn.Module | None = Conv(in_channels, inner, 1) if expand > 1 else None
        self.depthwise = SameConv(inner, inner, kernel, stride, groups=inner)
        self.squeeze = Conv(inner, max(1, in_channels // SQUEEZE), 1)
        self.excite = Conv(max(1, in_channels // SQUEEZE), inner, 1)
        self.project = Conv(inner, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:  # shapes: [B, C, h, w] -> [B, C', h / stride, w / stride]
        y = x if self.expand is None else F.silu(self.expand(x))
        y = F.silu(self.depthwise(y))
        gate = self.excite(F.silu(self.squeeze(y.mean(dim=(2, 3), keepdim=True))))
        y = self.project(y * torch.sigmoid(gate))
        return x + y if self.adds else y


class EfficientNet(nn.Module):
    """EfficientNet-B0 without its classifier. It returns the mean of the last feature map."""

    blocks: Sequence[Block]

    def __init__(self, config: EfficientNetConfig, in_channels: int = 3):
        super().__init__()
        self.stem = SameConv(in_channels, config.stem, 3, 2)
        blocks, before = [], config.stem
        for stage, width in enumerate(config.widths):
            expand = EXPAND if stage else 1
            blocks.append(Block(before, width, KERNELS[stage], STRIDES[stage], expand, adds=False))
            rest = range(DEPTHS[stage] - 1)
            blocks += [Block(width, width, KERNELS[stage], 1, expand, adds=True) for _ in rest]
            before = width
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.head = Conv(before, config.out_channels, 1)

    def forward(
        self, pixels: Tensor
    ) -> Tensor:  # input [B, in_channels, h, w], h and w multiples of 32; output [B, out_channels]
        x = F.silu(self.stem(pixels))
        for block in self.blocks:
            x = block(x)
        return F.silu(self.head(x)).mean(dim=(2, 3))
