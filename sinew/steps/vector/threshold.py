"""A step for a gripper that is either open or closed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core.fields import Finite
from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class Threshold(VectorStep):
    """Replace each number by ``above`` if it is larger than ``offset``, otherwise by ``below``."""

    dims: tuple[int, ...]
    offset: Finite = 0.0
    below: Finite = 1.0
    above: Finite = -1.0
    kind: Literal["threshold"] = field(default="threshold", kw_only=True, repr=False)
    monotone = False
    no_inverse = "all values on one side of the threshold become one value"

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return np.where(part > self.offset, self.above, self.below)

    def __str__(self) -> str:
        return f"{self.above:g} where {spans(self.dims)} > {self.offset:g}, else {self.below:g}"
