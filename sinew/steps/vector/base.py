"""The interface of a step that changes a state or action vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sinew.core.fields import Tagged
from sinew.steps import registry


class VectorStep(Tagged):
    """One conversion of units or coordinate frame, between a robot's vector and the vector that training normalised.

    Attributes:
        dims: Indices of the vector that the step changes. Other values stay unchanged.
        monotone: True if each dimension is converted alone, and the ends of a range become the ends of the new range.
    """

    registry = registry.VECTOR
    dims: tuple[int, ...]
    monotone: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the dimensions of the state that the step reads. The state's own processing steps have been
        applied before.
        """
        return ()

    @property
    def choices(self) -> tuple[float, ...]:
        """Return the only values that the step accepts, or () if it accepts any value."""
        return ()

    @property
    def no_inverse(self) -> str:
        """Return the reason why the step has no inverse, or "" if :meth:`inverse` computes it."""
        return ""

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        """Return the values after the step.

        Args:
            part: ``x[dims]``, [..., n].
            reference: ``state[reads]``, or None without a state.
        """
        raise NotImplementedError

    def inverse(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        """Undo :meth:`forward`, for a step with an inverse."""
        raise NotImplementedError

    def of(self, state: np.ndarray | None) -> np.ndarray | None:
        """Select the values of a state [D] that the step reads; None if the step does not read the state."""
        if not self.reads:
            return None
        assert state is not None, "actions relative to the state need the state"
        return state[list(self.reads)]


def apply_steps(x: np.ndarray, steps: Sequence[VectorStep], state: np.ndarray | None = None) -> np.ndarray:
    """Apply all steps to x in order, and return the result, which has the same shape.

    Args:
        x: float [..., D].
        steps: The steps.
        state: The robot's state after its own processing steps, float [D], for steps that read it.
    """
    if not steps:
        return x
    x = x.copy()
    for step in steps:
        dims = list(step.dims)
        x[..., dims] = step.forward(x[..., dims], step.of(state))
    return x


def turn_back(x: np.ndarray, steps: Sequence[VectorStep], state: np.ndarray) -> np.ndarray:
    """Undo :func:`apply_steps`. All steps must have an inverse.

    Args:
        x: The vectors after the steps, float [..., D].
        steps: The steps.
        state: The robot's state after its own processing steps, for steps that read the state.
    """
    x = x.copy()
    for step in reversed(steps):
        dims = list(step.dims)
        x[..., dims] = step.inverse(x[..., dims], step.of(state))
    return x


def spans(dims: Sequence[int]) -> str:
    """Return a list of dimensions as text, with consecutive dimensions as a range."""
    if len(dims) > 2 and list(dims) == list(range(dims[0], dims[-1] + 1)):
        return f"{dims[0]}-{dims[-1]}"
    return ", ".join(map(str, dims))
