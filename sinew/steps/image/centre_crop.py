"""TensorFlow's crop_and_resize of the middle of a frame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core import MAX_SIZE
from sinew.steps.base import within
from sinew.steps.image.base import ImageStep
from sinew.steps.image.tensorflow import centre_crop


@dataclass(frozen=True)
class CentreCrop(ImageStep):
    """The middle part of this ``area``, resized to ``height`` x ``width``."""

    height: int
    width: int
    area: float = 1.0
    kind: Literal["centre_crop"] = field(default="centre_crop", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        for name, side in (("height", self.height), ("width", self.width)):
            yield from within(name, side, 1, MAX_SIZE)
        if not 0 < self.area <= 1:
            yield f"area: expected a part of the frame, above 0 and at most 1, got {self.area:g}"

    @property
    def fixed(self) -> tuple[int, int]:
        return self.height, self.width

    def forward(self, frame: np.ndarray) -> np.ndarray:
        return centre_crop(frame, self.area, self.height, self.width)

    def __str__(self) -> str:
        return f"middle {self.area:.0%} to {self.height}x{self.width}"
