"""A step that changes units, zero or sign."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core.fields import Finite
from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class Affine(VectorStep):
    """Compute x * scale + offset."""

    dims: tuple[int, ...]
    scale: Finite = 1.0
    offset: Finite = 0.0
    kind: Literal["affine"] = field(default="affine", kw_only=True, repr=False)

    @property
    def no_inverse(self) -> str:
        return "" if self.scale else "a scale of zero removes the value"

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return part * self.scale + self.offset

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return (part - self.offset) / self.scale

    def __str__(self) -> str:
        return f"x * {self.scale:g} + {self.offset:g} of {spans(self.dims)}"
