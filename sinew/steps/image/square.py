"""A step that adds black bars to a frame until it is square."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.steps.image.base import ImageStep


@dataclass(frozen=True)
class Square(ImageStep):
    """Add black bars to both sides until the frame is square. The picture keeps its size."""

    kind: Literal["square"] = field(default="square", kw_only=True, repr=False)

    def size(self, height: int, width: int) -> tuple[int, int]:
        return (max(height, width),) * 2

    def forward(self, frame: np.ndarray) -> np.ndarray:
        height, width = frame.shape[:2]
        side, _ = self.size(height, width)
        out = np.zeros((side, side, 3), np.uint8)
        top, left = (side - height) // 2, (side - width) // 2
        out[top : top + height, left : left + width] = frame
        return out

    def __str__(self) -> str:
        return "black bars to a square"
