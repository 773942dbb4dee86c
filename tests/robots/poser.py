"""A policy that answers with one pose, for robots that must reach this pose."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from sinew.core import ActionChunk, CameraSpec, Observation, ObservationError, PolicySpec, VectorSpec
from sinew.serve.served import ServedPolicy

ROWS = 30


class Poser(ServedPolicy):
    """A policy whose actions all contain the pose ``goal`` [D]. It stores the observations that it gets.

    Args:
        joints: Names of the values in its state and its action.
        cameras: Name -> height and width.
        step: Largest change of a number from one action to the next, where the first action starts at the state. None:
            no limit, so that only the limits of the loop apply.
    """

    def __init__(
        self,
        goal: Sequence[float],
        joints: Sequence[str],
        cameras: dict[str, tuple[int, int]] | None = None,
        step: float = np.inf,
    ):
        self.step = step
        self.goal = np.float32(goal)
        self.seen: list[Observation] = []
        self.spec = PolicySpec(
            architecture="poser",
            name="poser",
            cameras=tuple(CameraSpec(name, *size) for name, size in (cameras or {}).items()),
            state=VectorSpec(len(joints), tuple(joints)),
            action=VectorSpec(len(joints), tuple(joints)),
            chunk_size=ROWS,
            noise_dim=len(joints),
            solver_steps=1,
            max_prompt_tokens=16,
        )

    def prepare(self, observation: Observation) -> Observation:
        shape = np.shape(observation.state)
        if shape != (self.spec.state.dim,):
            raise ObservationError("state", f"shape [{self.spec.state.dim}]", f"shape {list(shape)}")
        return observation

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        self.seen.append(observation)
        way = self.goal - np.asarray(observation.state, np.float32)
        shares = np.minimum(1.0, np.arange(1, ROWS + 1) * self.step / max(np.abs(way).max(), 1e-9))
        rows = self.goal - way * (1.0 - shares[:, None])
        return ActionChunk(rows.astype(np.float32), seed=0, session=observation.session)

    def warm_up(self) -> None:
        pass
