"""A step that crops the middle of a frame without a resize."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from sinew.core import MAX_SIZE
from sinew.core.fields import share, within
from sinew.steps.image.base import ImageStep


@dataclass(frozen=True)
class Crop(ImageStep):
    """Crop the centre of a frame to ``fraction`` of both sides, in whole pixels, or to ``height`` x ``width``.

    The fraction 0 selects ``height`` x ``width``.

    Attributes:
        rounded: True rounds the position of the crop to whole pixels (torchvision). False truncates it
            (albumentations).
        floats: True accepts float32 frames, False accepts uint8 frames.
    """

    height: int = 0
    width: int = 0
    fraction: Annotated[float, share("both sides", none=True)] = 0.0
    rounded: bool = False
    floats: bool = False
    kind: Literal["crop"] = field(default="crop", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if self.fraction == 0:
            for name, side in (("height", self.height), ("width", self.width)):
                yield from within(1, MAX_SIZE).problems(name, side)

    @property
    def takes(self) -> Literal["bytes", "floats"]:
        return "floats" if self.floats else "bytes"

    def size(self, height: int, width: int) -> tuple[int, int]:
        if self.fraction:
            return max(int(height * self.fraction), 1), max(int(width * self.fraction), 1)
        return min(self.height, height), min(self.width, width)

    def forward(self, frame: np.ndarray) -> np.ndarray:
        height, width = frame.shape[:2]
        to_height, to_width = self.size(height, width)
        spare = height - to_height, width - to_width
        top, left = (round(n / 2) if self.rounded else n // 2 for n in spare)
        return frame[top : top + to_height, left : left + to_width]

    def __str__(self) -> str:
        if self.fraction:
            return f"middle {self.fraction:.0%} of both sides"
        return f"middle {self.height}x{self.width}"
