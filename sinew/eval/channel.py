"""How long a chunk is under way: simulated in control steps, or measured by the wall clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from sinew.eval.handover import Arrival
from sinew.eval.policies import EvalPolicy


class Channel(Protocol):
    """Carries one request at a time. ``latencies``: milliseconds of every inference so far."""

    latencies: list[float]

    def submit(self, observation: Mapping[str, Any], seed: int, step: int, age: int, delay: int) -> None:
        """Ask at control step ``step`` with a frame that is ``age`` steps old."""

    def poll(self, step: int) -> Arrival | None:
        """The chunk, once it is there."""

    def tick(self) -> None:
        """Called after every control step."""

    def close(self) -> None: ...


class Simulated:
    """The answer is computed at once and handed over ``delay`` control steps later: the result of an episode
    does not depend on the machine that plays it."""

    def __init__(self, policy: EvalPolicy):
        self.policy = policy
        self.latencies: list[float] = []
        self._pending: tuple[int, Arrival] | None = None

    def submit(self, observation: Mapping[str, Any], seed: int, step: int, age: int, delay: int) -> None:
        actions, milliseconds = self.policy.infer(observation, seed)
        self.latencies.append(milliseconds)
        self._pending = (step + delay, Arrival(actions, step, step - age))

    def poll(self, step: int) -> Arrival | None:
        if self._pending is None or self._pending[0] > step:
            return None
        arrival, self._pending = self._pending[1], None
        return arrival

    def tick(self) -> None:
        """Nothing: the world waits for nobody."""

    def close(self) -> None:
        """Nothing to close."""


class Measured:
    """Real time: the policy answers in a thread of its own while :meth:`tick` paces the world at ``control_hz``.

    ``late_ticks`` counts the control steps that began more than half a period after they were due.
    """

    def __init__(self, policy: EvalPolicy, control_hz: float):
        self.policy, self.period = policy, 1.0 / control_hz
        self.latencies: list[float] = []
        self.late_ticks = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._pending: tuple[Future[tuple[np.ndarray, float]], int, int] | None = None
        self._due = time.perf_counter() + self.period

    def submit(self, observation: Mapping[str, Any], seed: int, step: int, age: int, delay: int) -> None:
        self._pending = (self._thread.submit(self.policy.infer, observation, seed), step, step - age)

    def poll(self, step: int) -> Arrival | None:
        if self._pending is None or not self._pending[0].done():
            return None
        (future, requested, frame), self._pending = self._pending, None
        actions, milliseconds = future.result()
        self.latencies.append(milliseconds)
        return Arrival(actions, requested, frame)

    def tick(self) -> None:
        now = time.perf_counter()
        if now > self._due + self.period / 2:
            self.late_ticks += 1
            self._due = now  # lost time is lost: the next steps are not rushed
        else:
            time.sleep(max(0.0, self._due - now))
        self._due += self.period

    def close(self) -> None:
        self._thread.shutdown()
