"""A step that limits the distance of a position from the origin to the largest distance in the training data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from sinew.core.fields import FINITE, positive
from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class Reach(VectorStep):
    """Compute x * min(1, radius / |x|). A position outside ``radius`` is moved straight towards the origin."""

    dims: tuple[int, ...]
    radius: Annotated[float, FINITE, positive("a distance")]
    kind: Literal["reach"] = field(default="reach", kw_only=True, repr=False)
    monotone = False  # each number of the result depends on all numbers

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        far = np.sqrt((part * part).sum(axis=-1, keepdims=True))
        return np.where(far > self.radius, part * (self.radius / np.maximum(far, self.radius)), part)

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return part  # the original distance of a clipped position is not known

    def __str__(self) -> str:
        return f"{spans(self.dims)} within {self.radius:g}"
