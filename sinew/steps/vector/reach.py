"""A place that lies no further off than those of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.steps.vector.base import VectorStep, finite, spans


@dataclass(frozen=True)
class Reach(VectorStep):
    """x * min(1, radius / |x|): a place further off than ``radius`` is moved straight towards the origin."""

    dims: tuple[int, ...]
    radius: float
    kind: Literal["reach"] = field(default="reach", kw_only=True, repr=False)
    monotone = False  # of one number the others decide

    def problems(self) -> Iterator[str]:
        yield from finite(radius=self.radius)
        if not self.radius > 0:
            yield f"radius: expected a distance above 0, got {self.radius:g}"

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        far = np.sqrt((part * part).sum(axis=-1, keepdims=True))
        return np.where(far > self.radius, part * (self.radius / np.maximum(far, self.radius)), part)

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return part  # where the step left it, which one of those beyond it was

    def __str__(self) -> str:
        return f"{spans(self.dims)} within {self.radius:g}"
