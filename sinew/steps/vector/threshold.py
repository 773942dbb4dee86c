"""A gripper that is open or shut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.steps.vector.base import VectorStep, finite, spans


@dataclass(frozen=True)
class Threshold(VectorStep):
    """``above`` where x > offset, else ``below``."""

    dims: tuple[int, ...]
    offset: float = 0.0
    below: float = 1.0
    above: float = -1.0
    kind: Literal["threshold"] = field(default="threshold", kw_only=True, repr=False)
    monotone = False
    no_inverse = "all values of a side become one"

    def problems(self) -> Iterator[str]:
        yield from finite(offset=self.offset, below=self.below, above=self.above)

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return np.where(part > self.offset, self.above, self.below)

    def __str__(self) -> str:
        return f"{self.above:g} where {spans(self.dims)} > {self.offset:g}, else {self.below:g}"
