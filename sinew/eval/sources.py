"""Where the rows of an episode come from: requests whose time is simulated, or measured by the wall clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sinew_client.control import Outcome, Requester

from sinew.core import SinewError
from sinew.eval.policies import EvalPolicy
from sinew.eval.settings import Latency


def chunk_seed(noise: int, seed: int, replan: int) -> int:
    """Seed of the noise of one chunk; 63 bits, as every wire can carry."""
    words = np.random.SeedSequence([noise, seed, replan]).generate_state(2, np.uint32)
    return int(words[0]) << 31 | int(words[1]) >> 1


class Simulated:
    """Requests that are answered at once and whose answers are handed over when their delay has passed: the result of
    an episode does not depend on the machine that plays it.

    noise, seed: of the run and the episode, from which each request has its own delay and noise. hz: control steps per
    second. latencies: milliseconds of every inference so far. What the policy raises ends the episode.
    """

    failures = 0

    def __init__(self, policy: EvalPolicy, noise: int, seed: int, latency: Latency, hz: float):
        self.policy, self._latency, self._hz = policy, latency, hz
        self._luck, self._asked = (noise, seed), 0
        self.latencies: list[float] = []
        self._pending: tuple[int, np.ndarray] | None = None  # the step in which it is there, and the chunk

    def ready(self, now: float) -> bool:
        return self._pending is None

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        rng = np.random.default_rng([*self._luck, self._asked, 1])
        delay = self._latency.steps(rng, self._hz)
        actions, milliseconds = self.policy.infer(
            _timeless(observation), chunk_seed(*self._luck, self._asked)
        )
        self.latencies.append(milliseconds)
        self._asked += 1
        self._pending = (round(now * self._hz) + delay, actions)

    def poll(self, now: float) -> Outcome | None:
        if self._pending is None or self._pending[0] > round(now * self._hz):
            return None
        actions, self._pending = self._pending[1], None
        return Outcome(actions)

    def cancel(self) -> None:
        self._pending = None

    def close(self, wait: float = 0.0) -> None:
        """Do nothing: nothing is open."""


class Measured(Requester):
    """Requests by the wall clock, as a robot sends them. What the policy raises ends the episode."""

    def __init__(self, policy: EvalPolicy, noise: int, seed: int):
        super().__init__(lambda: lambda request, _: policy.infer(*request["what"]), float("inf"))
        self._luck, self._asked = (noise, seed), 0
        self.latencies: list[float] = []

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        super().ask({"what": (_timeless(observation), chunk_seed(*self._luck, self._asked))}, now)
        self._asked += 1

    def poll(self, now: float) -> Outcome | None:
        outcome = super().poll(now)
        if outcome is None:
            return None
        if outcome.reason:
            raise SinewError(outcome.reason)
        actions, milliseconds = outcome.value
        self.latencies.append(milliseconds)
        return Outcome(actions)


def _timeless(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return an observation without the loop's own clock, which is nothing that a policy is asked."""
    return {name: value for name, value in observation.items() if name != "time"}
