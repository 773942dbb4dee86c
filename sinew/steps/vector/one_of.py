"""A step that checks a value against a fixed set of values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core import ObservationError
from sinew.core.fields import Finite
from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class OneOf(VectorStep):
    """Check that x is one of ``values``, and leave it unchanged.

    ``words`` contains the meaning of each value as text.
    """

    dims: tuple[int, ...]
    values: tuple[Finite, ...]
    words: tuple[str, ...] = ()
    kind: Literal["one_of"] = field(default="one_of", kw_only=True, repr=False)
    monotone = False  # the step has no values between two choices

    def problems(self) -> Iterator[str]:
        if len(set(self.values)) < max(1, len(self.values)):
            yield "values: expected one or more different values"
        if self.words and len(self.words) != len(self.values):
            yield f"words: expected {len(self.values)} meanings, one for each value, got {len(self.words)}"

    @property
    def choices(self) -> tuple[float, ...]:
        return self.values

    @property
    def meanings(self) -> str:
        """Return the allowed values as text, each with its meaning."""
        words = self.words or ("",) * len(self.values)
        return ", ".join(f"{value:g} {word}".strip() for value, word in zip(self.values, words, strict=True))

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        for value in np.ravel(part):
            if value not in self.values:
                raise ObservationError(f"state[{self.dims[0]}]", f"one of {self.meanings}", f"{value:g}")
        return part

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        return part

    def __str__(self) -> str:
        return f"{spans(self.dims)} one of {self.meanings}"
