"""A step that puts a frame in several sizes below one another, for models that read two sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from sinew.core import MAX_SIZE
from sinew.core.fields import SOME, Side, within
from sinew.steps.image.methods import Method, MethodStep, resize


@dataclass(frozen=True)
class Scales(MethodStep):
    """Resize a frame to a square of each of ``sides`` by ``method``.

    The squares are arranged in one column. The area at the right of smaller squares is black.
    """

    sides: Annotated[tuple[Side, ...], SOME]
    method: Method = "pil_bicubic"
    kind: Literal["scales"] = field(default="scales", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        yield from within(1, MAX_SIZE).problems("sides", sum(self.sides))

    @property
    def fixed(self) -> tuple[int, int]:
        return sum(self.sides), max(self.sides)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return max(self.sides), max(self.sides)

    def forward(self, frame: np.ndarray) -> np.ndarray:
        result = np.zeros((*self.fixed, 3), frame.dtype)
        top = 0
        for side in self.sides:
            result[top : top + side, :side] = resize(frame, side, side, self.method)
            top += side
        return result

    def __str__(self) -> str:
        return f"{self.method} to {' and '.join(f'{side}x{side}' for side in self.sides)}"
