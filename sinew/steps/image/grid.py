"""The resize of Qwen's image processors, to a whole number of patches within limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sinew.core import MAX_SIZE
from sinew.core.fields import Side, within
from sinew.steps.image.methods import Method, MethodStep


@dataclass(frozen=True)
class Grid(MethodStep):
    """Resize both sides to multiples of ``unit``, with ``min_pixels`` to ``max_pixels`` in total, by ``method``."""

    unit: Side
    min_pixels: int
    max_pixels: Annotated[int, within(1, MAX_SIZE**2)]
    method: Method = "lanczos3"
    kind: Literal["grid"] = field(default="grid", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        yield from within(1, self.max_pixels).problems("min_pixels", self.min_pixels)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that Qwen's ``smart_resize`` chooses for a frame."""
        unit = self.unit
        rows, cols = max(round(height / unit), 1) * unit, max(round(width / unit), 1) * unit
        if rows * cols > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            rows, cols = (max(math.floor(side / ratio / unit), 1) * unit for side in (height, width))
        elif rows * cols < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            rows, cols = (math.ceil(side * ratio / unit) * unit for side in (height, width))
        return rows, cols

    def __str__(self) -> str:
        return f"{self.method} to multiples of {self.unit}"
