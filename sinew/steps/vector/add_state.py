"""A step for actions that are relative to the state (delta actions)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class AddState(VectorStep):
    """Compute x + state[state_dims], to convert relative actions to absolute actions.

    If ``state_dims`` is empty, the step adds state[dims].
    """

    dims: tuple[int, ...]
    state_dims: tuple[int, ...] = ()
    kind: Literal["add_state"] = field(default="add_state", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if len(self.reads) != len(self.dims):
            yield f"state_dims: expected {len(self.dims)} indices, one for each of dims, got {len(self.reads)}"

    @property
    def reads(self) -> tuple[int, ...]:
        return self.state_dims or self.dims

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        assert reference is not None  # apply_steps passes the state, because the step reads it
        return part + reference

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        assert reference is not None  # apply_steps passes the state, because the step reads it
        return part - reference

    def __str__(self) -> str:
        return f"{spans(self.dims)} + state {spans(self.reads)}"
