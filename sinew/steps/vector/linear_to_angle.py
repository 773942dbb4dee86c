"""A step that converts a gripper's linear opening to the angle of its servo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from sinew.core.fields import FINITE, Finite, positive
from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class LinearToAngle(VectorStep):
    """Compute arcsin((horn^2 + x^2 - arm^2) / (2 horn x)), with the argument clipped to [-1, 1].

    Lengths are in metres.
    """

    dims: tuple[int, ...]
    arm: Finite
    horn: Annotated[float, FINITE, positive("a length")]
    kind: Literal["linear_to_angle"] = field(default="linear_to_angle", kw_only=True, repr=False)
    no_inverse = "two openings have the same angle"

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        with np.errstate(divide="ignore"):  # an opening of zero gives infinity, which is clipped
            sine = (self.horn**2 + part**2 - self.arm**2) / (2 * self.horn * part)
        return np.arcsin(np.clip(sine, -1.0, 1.0))

    def __str__(self) -> str:
        return f"opening to angle of {spans(self.dims)} (arm {self.arm:g} m, horn {self.horn:g} m)"
