"""A U-Net of one-dimensional convolutions over the actions of a chunk (Chi et al. 2023, arXiv 2303.04137).

Each stage has two residual blocks, and half the rows (actions) of the stage before. In the upward path a stage also
reads the output of the downward stage with the same number of rows. A condition scales and shifts the channels of
each block (FiLM, Perez et al. 2018). The condition is the same for all rows. The caller passes the condition after
its projection, so the part that does not depend on the solver's time is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.linear import Conv1d
from sinew.layers.norm import GroupNorm
from sinew.layers.sizes import check_sizes

NORM_EPS = 1e-5  # default of torch; the reference implementation uses the default too
# Number of groups of the last group norm. The configuration sets the number only for the other norms.
LAST_GROUPS = 8
MAX_STAGES = 8


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of a U-Net.

    Attributes:
        widths: Number of channels of each stage.
        kernel_size: Number of rows that a convolution reads.
        num_groups: Number of groups of each group norm except the last.
        scales: True if the condition scales and shifts the channels, False if it only shifts them.
    """

    widths: tuple[int, ...]
    kernel_size: int = 5
    num_groups: int = 8
    scales: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        if not 1 <= len(self.widths) <= MAX_STAGES:
            raise ValueError(f"widths: expected 1 to {MAX_STAGES} stages, got {len(self.widths)}")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size: expected an odd number, got {self.kernel_size}")
        for width in self.widths:
            if width < 1 or width % self.num_groups:
                raise ValueError(f"widths: expected multiples of num_groups {self.num_groups}, got {width}")
        if self.widths[0] % LAST_GROUPS:
            raise ValueError(
                f"widths: the first width must be a multiple of {LAST_GROUPS}, got {self.widths[0]}"
            )

    @property
    def unit(self) -> int:
        """The number of actions of a chunk must be a multiple of this number. Each stage except the last halves the
        number of rows, which must stay whole.
        """
        return 2 ** (len(self.widths) - 1)

    @property
    def film_sizes(self) -> list[int]:
        """Number of condition values for each residual block, in the order in which the blocks run."""
        stages = (*self.widths, self.widths[-1], *reversed(self.widths[:-1]))
        return [width * (2 if self.scales else 1) for width in stages for _ in range(2)]


class ToActions(Conv1d):
    """The last convolution. Its weights always stay floats, because their rounding would reach the actions directly."""


class Upsample(nn.ConvTranspose1d):
    """A transposed convolution that doubles the rows, in the precision of its weight."""

    def __init__(self, channels: int):
        super().__init__(channels, channels, 4, 2, 1)

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(x.to(self.weight.dtype), output_size)


class ConvBlock(nn.Module):
    """A convolution, a group norm and a Mish activation."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, groups: int):
        super().__init__()
        self.conv = Conv1d(in_channels, out_channels, kernel, padding=kernel // 2)
        self.norm = GroupNorm(groups, out_channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:  # input shape [B, C, H], output shape [B, C', H]
        return F.mish(self.norm(self.conv(x)))


class Residual(nn.Module):
    """A residual block whose channels the condition scales and shifts."""

    def __init__(self, in_channels: int, out_channels: int, config: UNetConfig):
        super().__init__()
        self.scales = config.scales
        self.conv1 = ConvBlock(in_channels, out_channels, config.kernel_size, config.num_groups)
        self.conv2 = ConvBlock(out_channels, out_channels, config.kernel_size, config.num_groups)
        same = in_channels == out_channels
        self.shortcut: nn.Module = nn.Identity() if same else Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, film: Tensor) -> Tensor:
        """Run the block.

        Args:
            x: Input, [B, C, H].
            film: [B, C' or 2C'], the scales before the shifts.

        Returns:
            Output, [B, C', H].
        """
        y, film = self.conv1(x), film[..., None]
        if self.scales:
            scale, shift = film.to(y.dtype).chunk(2, dim=1)  # [B, C', 1] each
            y = scale * y + shift
        else:
            y = y + film.to(y.dtype)
        return self.conv2(y) + self.shortcut(x)


class UNetStage(nn.Module):
    """A stage of two residual blocks. After both blocks, ``resample`` halves, doubles or keeps the number of rows."""

    def __init__(self, in_channels: int, out_channels: int, config: UNetConfig, resample: nn.Module):
        super().__init__()
        self.first = Residual(in_channels, out_channels, config)
        self.second = Residual(out_channels, out_channels, config)
        self.resample = resample

    def forward(self, x: Tensor, films: Iterator[Tensor]) -> Tensor:  # shapes: [B, C, H] -> [B, C', H]
        return self.second(self.first(x, next(films)), next(films))


class UNet(nn.Module):
    """The U-Net: stages on the downward path, a middle, stages on the upward path, and the last convolutions."""

    down: Sequence[UNetStage]
    up: Sequence[UNetStage]

    def __init__(self, channels: int, config: UNetConfig):
        super().__init__()
        self.config = config
        widths = config.widths
        halves = [Conv1d(width, width, 3, 2, 1) for width in widths[:-1]]
        down = [
            UNetStage(before, width, config, resample)
            for before, width, resample in zip(
                (channels, *widths[:-1]), widths, (*halves, nn.Identity()), strict=True
            )
        ]
        up = [
            UNetStage(2 * before, width, config, Upsample(width))
            for before, width in zip(widths[:0:-1], widths[-2::-1], strict=True)
        ]
        self.down = nn.ModuleList(down)  # type: ignore[assignment]
        self.middle = UNetStage(widths[-1], widths[-1], config, nn.Identity())
        self.up = nn.ModuleList(up)  # type: ignore[assignment]
        self.end = ConvBlock(widths[0], widths[0], config.kernel_size, LAST_GROUPS)
        self.out = ToActions(widths[0], channels, 1)

    def forward(self, x: Tensor, film: Tensor) -> Tensor:
        """Run the U-Net.

        Args:
            x: [B, H, A], with H a multiple of the configuration's ``unit``.
            film: [B, sum of the configuration's ``film_sizes``].

        Returns:
            Output, [B, H, A].
        """
        films = iter(film.split(self.config.film_sizes, dim=-1))
        x, skipped = x.transpose(1, 2), []  # [B, A, H]
        for stage in self.down:
            x = stage(x, films)
            skipped.append(x)
            x = stage.resample(x)
        x = self.middle(x, films)
        for stage in self.up:
            x = stage.resample(stage(torch.cat([x, skipped.pop()], dim=1), films))
        return self.out(self.end(x)).transpose(1, 2)
