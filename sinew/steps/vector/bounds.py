"""A step that rejects values outside a range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core import ObservationError
from sinew.core.fields import Finite
from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class ValueBounds(VectorStep):
    """Check that each value is between ``low`` and ``high``, and leave the values unchanged."""

    dims: tuple[int, ...]
    low: Finite = -1.0
    high: Finite = 1.0
    kind: Literal["bounds"] = field(default="bounds", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if self.low > self.high:
            yield f"low: expected at most high, {self.high:g}, got {self.low:g}"

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        for dim, values in zip(self.dims, np.moveaxis(part, -1, 0), strict=True):
            for value in np.ravel(values):
                if not self.low <= value <= self.high:
                    raise ObservationError(
                        f"state[{dim}]", f"a value from {self.low:g} to {self.high:g}", f"{value:g}"
                    )
        return part

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return part

    def __str__(self) -> str:
        return f"{spans(self.dims)} from {self.low:g} to {self.high:g}"
