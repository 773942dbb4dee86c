"""The scripted expert of a simulated task as a leader, which takes over from a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sinew.core import SinewError
from sinew.sim.experts import open_expert

if TYPE_CHECKING:
    from sinew.eval.robot import SimulatedRobot


class ExpertLeader:
    """What the expert of a robot's environment would do now. Implements ``Leader`` of ``sinew_client.control``.

    after: control steps of an episode after which it takes over by itself, until the next one begins; None: when told
    alone. A policy that succeeds is done by then, so it corrects those that fail.
    """

    def __init__(self, robot: SimulatedRobot, after: int | None = None):
        spec = robot.env.spec
        if spec is None:
            raise SinewError(
                "--takeover expert: expected an environment with an expert, got one without a name"
            )
        if after is not None and (isinstance(after, bool) or not isinstance(after, int) or after < 1):
            raise SinewError(f"--takeover-options: after: expected a whole number of steps, got {after!r}")
        self._robot, self._after = robot, after
        self._expert = open_expert(spec.id)
        self._episode = -1

    @property
    def wanted(self) -> bool:
        """Return True if the present episode takes longer than it should."""
        return self._after is not None and self._robot.steps >= self._after

    def read(self) -> np.ndarray:
        """Return what the expert does in the environment's present state, float32 [D]."""
        if self._episode != self._robot.finished:
            self._expert.start(self._robot.env)
            self._episode = self._robot.finished
        return self._expert.infer({"images": {}, "state": np.zeros(0, np.float32)}).actions[0]

    def close(self) -> None:
        self._expert.close()
