"""Sources of an episode's actions: requests with simulated or measured latency, and streams in simulated time.

A simulated computation runs at once, and its result arrives after its simulated duration. Therefore the outcome of an
episode does not depend on the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sinew.core import SinewError
from sinew.stream.session import Session, StateSample
from sinew_client.control import Outcome, Requester
from sinew_client.faults import Faults
from sinew_client.streams import StreamWindow

from sinew_eval.episodes.policies import EvalPolicy
from sinew_eval.episodes.settings import Latency, StreamCosts


def chunk_seed(noise: int, seed: int, replan: int) -> int:
    """Return the noise seed of one chunk. It has 63 bits, which every protocol can carry.

    Args:
        noise: Number of the run.
        seed: Seed of the episode.
        replan: Number of the chunk in the episode.
    """
    words = np.random.SeedSequence([noise, seed, replan]).generate_state(2, np.uint32)
    return int(words[0]) << 31 | int(words[1]) >> 1


class Simulated:
    """Source whose requests are computed at once. The answers arrive after their simulated delay.

    An error of the policy ends the episode.

    Args:
        policy: The policy.
        noise: Number of the run, for the seeds of delay and noise.
        seed: Seed of the episode, for the seeds of delay and noise.
        latency: Simulated delay.
        hz: Control steps per second.

    Attributes:
        latencies: Milliseconds of every inference so far.
    """

    continuous, failures = False, 0

    def __init__(self, policy: EvalPolicy, noise: int, seed: int, latency: Latency, hz: float):
        self.policy, self._latency, self._hz = policy, latency, hz
        self._luck, self._asked = (noise, seed), 0
        self.latencies: list[float] = []
        # Control step in which the pending chunk arrives, and the chunk.
        self._pending: tuple[int, np.ndarray] | None = None

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
        """Do nothing, because this source has no connection."""


class Measured(Requester):
    """Source whose requests are timed by the wall clock, as on a robot. An error of the policy ends the episode."""

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
    """Return an observation without the loop's clock, which policies do not receive."""
    return {name: value for name, value in observation.items() if name != "time"}


def way(latency: Latency) -> float:
    """Convert a constant latency to seconds.

    Raises:
        SinewError: The latency is not a plain number of milliseconds.
    """
    if latency.text != "0" and not (latency.text.endswith("ms") and latency.text[0].isdigit()):
        raise SinewError(f"latency: with --stream, expected milliseconds such as 50ms, got {latency.text!r}")
    return latency.milliseconds(1.0) / 1e3


class SimulatedLink:
    """A stream without a network, whose two loops run in simulated time.

    Args:
        session: The stream on the server's side.
        costs: Simulated times of the two loops.
        now: Returns the simulated time in seconds.
        way: Additional seconds until each action window arrives. Several windows can be on the way at once.
    """

    def __init__(self, session: Session, costs: StreamCosts, now: Callable[[], float], way: float = 0.0):
        self._session, self._costs, self._now, self._way = session, costs, now, way
        # End time of the running prefix computation in simulated seconds, and its result.
        self._slow: tuple[float, Any] | None = None
        # End time of the running computation of the action head in simulated seconds, and its window.
        self._fast: tuple[float, Any] | None = None
        # Each entry is (arrival time, action window), in the order of arrival.
        self._sent: list[tuple[float, StreamWindow]] = []
        self._clock = 0.0
        self.label = session.label
        # The error counters stay empty, because errors of a simulated stream are raised.
        self.errors, self.error, self.faults = 0, "", Faults()

    def send(
        self,
        state: Any,
        time: float,
        delay: int = 1,
        images: Mapping[str, Any] | None = None,
        frame_time: float | None = None,
        prompt: str = "",
    ) -> bool:
        self._advance(self._now())
        if prompt and prompt != self._session.prompt:
            self._session.say(prompt)
        self._session.push_sample(StateSample(np.array(state, np.float32), time, delay))
        if images is not None:
            self._session.push_frame(images, time if frame_time is None else frame_time)
        self._begin()
        return True

    def windows(self) -> list[StreamWindow]:
        now = self._now()
        self._advance(now)
        arrivals = [window for arrives, window in self._sent if arrives <= now + 1e-9]
        del self._sent[: len(arrivals)]
        return arrivals

    def restart(self) -> None:
        """Start a new stream with the next sample, without any state of the previous one."""
        self._session, self._slow, self._fast = self._session.anew(), None, None
        self._sent.clear()

    def close(self) -> None:
        """Do nothing, because this source has no connection."""

    def _advance(self, until: float) -> None:
        while True:
            ends = [job[0] for job in (self._slow, self._fast) if job is not None and job[0] <= until + 1e-9]
            if not ends:
                break
            self._clock = min(ends)
            if self._slow is not None and self._slow[0] <= self._clock:
                self._session.swap(self._slow[1])
                self._slow = None
            if self._fast is not None and self._fast[0] <= self._clock:
                self._sent.append((self._clock + self._way, self._fast[1]))
                self._fast = None
            self._begin()
        self._clock = until

    def _begin(self) -> None:
        """Start each of the stream's two loops if it is idle and has something to compute."""
        if self._slow is None and (prefix := self._session.compute()) is not None:
            self._slow = (self._clock + self._costs.prefix, prefix)
        if self._fast is None and (window := self._session.run()) is not None:
            sent = StreamWindow(
                window.step, window.rows, window.sample_time, window.frame_time, run=window.run
            )
            self._fast = (self._clock + self._costs.head, sent)
