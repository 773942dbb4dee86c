"""A step for end-effector poses that are relative to the pose in the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from sinew_client.rotations import compose

from sinew.steps.vector.base import VectorStep, spans


@dataclass(frozen=True)
class ComposePose(VectorStep):
    """Convert a pose that is relative to the state's pose to a pose in the robot's frame.

    A pose is a position and six numbers of a rotation (9 values), or a position and a rotation vector (6 values).

    Attributes:
        dims: Indices of the pose in the action.
        state_dims: Indices of the pose in the state. () means ``dims``.
    """

    dims: tuple[int, ...]
    state_dims: tuple[int, ...] = ()
    kind: Literal["compose_pose"] = field(default="compose_pose", kw_only=True, repr=False)
    monotone = False
    no_inverse = "Sinew does not convert poses back to another reference pose"

    def problems(self) -> Iterator[str]:
        for name, indices in (("dims", self.dims), ("state_dims", self.reads)):
            if len(indices) not in (6, 9) or len(indices) != len(self.dims):
                yield (
                    f"{name}: expected 6 or 9 indices of a pose, the same number for state and action, got"
                    f" {len(indices)}"
                )

    @property
    def reads(self) -> tuple[int, ...]:
        return self.state_dims or self.dims

    def forward(self, part: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        assert reference is not None  # apply_steps passes the state, because the step reads it
        return compose(reference, part)

    def __str__(self) -> str:
        return f"pose {spans(self.dims)} in the frame of state {spans(self.reads)}"
