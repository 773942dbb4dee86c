"""How long a chunk is under way: simulated in control steps, or measured by the wall clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from sinew_client.control import Pace, Requester

from sinew.core import SinewError
from sinew.eval.policies import EvalPolicy


class Channel(Protocol):
    """Carries one request at a time. ``latencies``: milliseconds of every inference so far."""

    latencies: list[float]

    def submit(self, observation: Mapping[str, Any], seed: int, step: int, delay: int) -> None:
        """Ask at control step ``step``."""

    def poll(self, step: int) -> np.ndarray | None:
        """Return the chunk, float32 [H, D], once it is there."""

    def tick(self) -> None:
        """Called after every control step."""

    def close(self) -> None: ...


class Simulated:
    """The answer is computed at once and handed over ``delay`` control steps later: the result of an episode
    does not depend on the machine that plays it."""

    late_ticks = 0

    def __init__(self, policy: EvalPolicy):
        self.policy = policy
        self.latencies: list[float] = []
        self._pending: tuple[int, np.ndarray] | None = None

    def submit(self, observation: Mapping[str, Any], seed: int, step: int, delay: int) -> None:
        actions, milliseconds = self.policy.infer(observation, seed)
        self.latencies.append(milliseconds)
        self._pending = (step + delay, actions)

    def poll(self, step: int) -> np.ndarray | None:
        if self._pending is None or self._pending[0] > step:
            return None
        actions, self._pending = self._pending[1], None
        return actions

    def tick(self) -> None:
        """Nothing: the world waits for nobody."""

    def close(self) -> None:
        """Nothing to close."""


class Measured:
    """Real time: the robot's own requester asks, and :meth:`tick` paces the world at ``control_hz``.

    ``late_ticks`` counts the control steps that began more than half a period after they were due.
    """

    def __init__(self, policy: EvalPolicy, control_hz: float):
        self.latencies: list[float] = []
        self._requester = Requester(lambda: lambda request, _: policy.infer(*request["what"]), float("inf"))
        self._pace = Pace(1.0 / control_hz)
        self._pace.next()

    @property
    def late_ticks(self) -> int:
        return self._pace.late + self._pace.skipped

    def submit(self, observation: Mapping[str, Any], seed: int, step: int, delay: int) -> None:
        self._requester.submit({"what": (observation, seed)}, self._pace.now())

    def poll(self, step: int) -> np.ndarray | None:
        outcome = self._requester.poll(self._pace.now())
        if outcome is None:
            return None
        if outcome.reason:
            raise SinewError(outcome.reason)
        actions, milliseconds = outcome.value
        self.latencies.append(milliseconds)
        return actions

    def tick(self) -> None:
        self._pace.next()

    def close(self) -> None:
        self._requester.close()
