"""A frame of a fixed size, whatever its aspect ratio was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core import MAX_SIZE
from sinew.steps.base import within
from sinew.steps.image.base import ImageStep
from sinew.steps.image.methods import Method, resize, takes


@dataclass(frozen=True)
class Resize(ImageStep):
    """To ``height`` x ``width`` by ``method``."""

    height: int
    width: int
    method: Method = "lanczos3"
    other_sizes: bool = False
    kind: Literal["resize"] = field(default="resize", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        for name, side in (("height", self.height), ("width", self.width)):
            yield from within(name, side, 1, MAX_SIZE)

    @property
    def takes(self) -> Literal["bytes", "floats"]:
        return takes(self.method)

    @property
    def fixed(self) -> tuple[int, int]:
        return self.height, self.width

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self.fixed

    def forward(self, frame: np.ndarray) -> np.ndarray:
        return resize(frame, self.height, self.width, self.method)

    def __str__(self) -> str:
        return f"{self.method} to {self.height}x{self.width}"
