"""A step that writes the state into a prompt as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core.fields import Side, Width
from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class State(PromptStep):
    """Write the normalised state as bin numbers.

    Attributes:
        values: Number of state values to write. A shorter state is padded with zeros, and a longer state is cut.
        bins: Number of equal bins of [-1, 1].
    """

    values: Width
    bins: Side = 256
    kind: Literal["state"] = field(default="state", kw_only=True, repr=False)
    slot = "{state}"
    reads_state = True

    def forward(self, said: PromptText) -> PromptText:
        return said.saying(" ".join(map(str, self.numbers(said.state))))

    def numbers(self, state: np.ndarray) -> np.ndarray:
        """Return bin numbers 0 .. bins - 1 of a normalised state [D]. Values below -1 give -1, as in the training
        project.

        The comparison is numpy's ``digitize`` with float64 edges, on values in the precision in which the training
        project normalises them. With another precision, values on an edge could change their bin.
        """
        values = np.zeros(self.values, state.dtype)
        count = min(len(values), len(state))
        values[:count] = state[:count]
        edges = np.linspace(-1, 1, self.bins + 1)[:-1]
        return np.digitize(values, edges) - 1

    def __str__(self) -> str:
        return f"{self.values} values of the state in {self.bins} bins"
