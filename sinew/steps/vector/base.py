"""The interface of a step that changes a state or action vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sinew.core.fields import Tagged
from sinew.steps import registry


class VectorStep(Tagged):
    """One change of units or frame between a robot's vector and the one that was normalised in training.

    dims: of the vector, those that the step changes; the others stay as they are. monotone: each dimension alone moves
    the ends of a range to the ends of another.
    """

    registry = registry.VECTOR
    dims: tuple[int, ...]
    monotone: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the dimensions of the (stepped) state that the step reads."""
        return ()

    @property
    def choices(self) -> tuple[float, ...]:
        """Return the only values that the step takes; () where it takes any."""
        return ()

    @property
    def no_inverse(self) -> str:
        """Return why the step cannot be turned back; "" where :meth:`inverse` does it."""
        return ""

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        """Return ``x[dims]``, [..., n], as the step leaves it; reference: ``state[reads]``, None without a state."""
        raise NotImplementedError

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        """Undo :meth:`forward`, for a step without :attr:`no_inverse`."""
        raise NotImplementedError

    def of(self, state: np.ndarray | None) -> np.ndarray | None:
        """Return the numbers of a state [D] that the step reads."""
        if not self.reads:
            return None
        assert state is not None, "actions relative to the state need the state"
        return state[list(self.reads)]


def apply_steps(x: np.ndarray, steps: Sequence[VectorStep], state: np.ndarray | None = None) -> np.ndarray:
    """x: float [..., D] -> the same shape, each step applied in order.

    ``state``: float [D], for steps that read it; the state after its own steps.
    """
    if not steps:
        return x
    x = x.copy()
    for step in steps:
        dims = list(step.dims)
        x[..., dims] = step.forward(x[..., dims], step.of(state))
    return x


def turn_back(x: np.ndarray, steps: Sequence[VectorStep], state: np.ndarray) -> np.ndarray:
    """Undo :func:`apply_steps` for steps that have an inverse, relative to this state."""
    x = x.copy()
    for step in reversed(steps):
        dims = list(step.dims)
        x[..., dims] = step.inverse(x[..., dims], step.of(state))
    return x


def spans(dims: Sequence[int]) -> str:
    """Return dimensions as words: neighbours as a range."""
    if len(dims) > 2 and list(dims) == list(range(dims[0], dims[-1] + 1)):
        return f"{dims[0]}-{dims[-1]}"
    return ", ".join(map(str, dims))
