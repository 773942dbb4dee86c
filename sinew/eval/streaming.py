"""Streams in simulated time: the robot's own loop over an environment, and two loops that take as long as they are
told.

Prefixes and head runs are computed when they begin and count from when they would have ended, so an episode's
outcome does not depend on the machine that plays it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.control import Stopped
from sinew_client.control.pace import Pace
from sinew_client.control.reaction import LOOPS, histogram
from sinew_client.control.report import percentiles
from sinew_client.control.stream import StreamLoop
from sinew_client.faults import Faults
from sinew_client.streams import StreamWindow

from sinew.core import SinewError
from sinew.eval.runner import Conduct, Episode
from sinew.eval.sources import chunk_seed
from sinew.stream import Session, StreamSettings
from sinew.stream.session import Sample

if TYPE_CHECKING:
    import gymnasium

    from sinew.eval.adapters import EnvAdapter
    from sinew.eval.settings import Latency
    from sinew.policy import Policy

_NUMBER = r"\d+(?:\.\d+)?"
_COSTS = re.compile(
    rf"(?P<prefix>{_NUMBER}):(?P<head>{_NUMBER})(?::(?P<guidance>guided|no-jacobian|ramp|none))?"
)


@dataclass(frozen=True)
class Costs:
    """What a prefix and a run of the head take, seconds of simulated time, and the guidance of whole chunks."""

    prefix: float
    head: float
    guidance: str = "none"

    @classmethod
    def parse(cls, text: str) -> Costs:
        """Return the costs of ``PREFIX:HEAD[:GUIDANCE]``, milliseconds. Raises SinewError."""
        found = _COSTS.fullmatch(text)
        if found is None:
            raise SinewError(
                f"stream: expected PREFIX:HEAD[:GUIDANCE] in milliseconds, such as 33:2, got {text!r}"
            )
        return cls(float(found["prefix"]) / 1e3, float(found["head"]) / 1e3, found["guidance"] or "none")


class SimulatedLink:
    """A stream without a socket whose two loops run in simulated time. ``now``: seconds of it.

    way: seconds that each window is under way beside what the loops take; several may be at once.
    """

    def __init__(self, session: Session, costs: Costs, now: Callable[[], float], way: float = 0.0):
        self._session, self._costs, self._now, self._way = session, costs, now, way
        self._slow: tuple[float, Any] | None = None  # when it ends, what it then gives
        self._fast: tuple[float, Any] | None = None
        self._sent: list[tuple[float, StreamWindow]] = []  # when each arrives, in that order
        self._clock = 0.0
        self.label = session.label
        self.errors, self.error, self.faults = 0, "", Faults()  # none: what fails here is raised

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
        self._session.push_sample(Sample(np.array(state, np.float32), time, delay))
        if images is not None:
            self._session.push_frame(images, time if frame_time is None else frame_time)
        self._begin()
        return True

    def windows(self) -> list[StreamWindow]:
        now = self._now()
        self._advance(now)
        found = [window for arrives, window in self._sent if arrives <= now + 1e-9]
        del self._sent[: len(found)]
        return found

    def restart(self) -> None:
        """Let the next sample begin a stream that knows nothing of what was before."""
        self._session, self._slow, self._fast = self._session.anew(), None, None
        self._sent.clear()

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
        """Begin what is idle and has something to do."""
        if self._slow is None and (prefix := self._session.compute()) is not None:
            self._slow = (self._clock + self._costs.prefix, prefix)
        if self._fast is None and (window := self._session.run()) is not None:
            sent = StreamWindow(
                window.step, window.rows, window.sample_time, window.frame_time, run=window.run
            )
            self._fast = (self._clock + self._costs.head, sent)


class EnvRobot:
    """An environment as the robot of a stream: each command or hold is one of its steps."""

    def __init__(self, env: gymnasium.Env, adapter: EnvAdapter, seed: int, options: dict[str, Any] | None):
        self.env, self.adapter = env, adapter
        self._raw, self.info = env.reset(seed=seed, options=options)
        self.task = adapter.task(self.info)
        self.prompt = str(adapter.observation(self._raw).get("prompt", ""))
        self.steps = self.executed = 0
        self.success = False
        self._last: Any = None
        self._frame: float | None = None

    def sense(self) -> np.ndarray:
        return self.adapter.observation(self._raw)["state"]

    def look(self) -> dict[str, Any] | None:
        age = float(self.info.get("camera_age", self.info.get("frame_age", 0.0)))
        taken = round(self.steps / self.adapter.control_hz - age, 6)
        if self._frame == taken:
            return None
        self._frame = taken
        return {"images": self.adapter.observation(self._raw)["images"], "age": age}

    def act(self, row: np.ndarray) -> None:
        self.executed += 1
        self._step(self.adapter.action(row))

    def hold(self) -> None:
        self._step(self.adapter.hold(self._last))

    def _step(self, action: Any) -> None:
        self._raw, reward, terminated, truncated, self.info = self.env.step(action)
        self._last = action
        self.steps += 1
        if terminated or truncated or self.steps >= self.adapter.max_steps:
            self.success = self.adapter.success(self.info, terminated, float(reward))
            raise Stopped("the episode is over")


def way(latency: Latency) -> float:
    """Return the seconds of a constant latency in milliseconds. Raises SinewError for any other one."""
    if latency.text != "0" and not (latency.text.endswith("ms") and latency.text[0].isdigit()):
        raise SinewError(
            f"latency: expected milliseconds, such as 50ms, beside --stream, got {latency.text!r}"
        )
    return latency.milliseconds(1.0) / 1e3


def run_stream_episode(
    env: gymnasium.Env, adapter: EnvAdapter, policy: Policy, conduct: Conduct, seed: int, costs: Costs
) -> Episode:
    """Play one episode on a stream, whose windows take the conduct's latency longer to arrive.

    Environments may tell when something happened (``info["stimuli"]``: "image" and "sensor", seconds or None); the
    episode then has the reaction to it.
    """
    begun = time.perf_counter()
    robot = EnvRobot(env, adapter, seed, conduct.reset_options)
    rate, settings = (
        adapter.control_hz,
        StreamSettings(adapter.control_hz, costs.guidance, seed=chunk_seed(conduct.noise, seed, 0) >> 2),
    )
    session = Session(policy, settings, robot.prompt, clock=lambda: 0.0)
    pace = Pace(1.0 / rate, now=lambda: robot.steps / rate, sleep=lambda _: None)
    link = SimulatedLink(session, costs, pace.now, way(conduct.latency))
    loop = StreamLoop(robot, link, rate, policy.spec.action.dim, robot.prompt, stale=float("inf"), pace=pace)
    try:
        while True:
            loop.tick(pace.next())
    except Stopped:
        pass
    stimuli = robot.info.get("stimuli", {})
    reactions = {
        name: [round(1e3 * each, 3) for each in loop.reactions.of(name, [at])]
        for name, at in stimuli.items()
        if at is not None
    }
    return Episode(
        seed=seed,
        task=robot.task,
        success=robot.success,
        steps=robot.steps,
        chunks=loop.windows,
        executed=robot.executed,
        held=loop.held["out of nodes"],
        misses=loop.misses,
        delays=[],
        latency_ms=[],
        chunk_size=policy.spec.chunk_size,
        wall_s=round(time.perf_counter() - begun, 4),
        reactions_ms=reactions,
    )


def reactions(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return p50, p95, p99, max and a histogram of the milliseconds that each loop of a stream took to react."""
    found: dict[str, Any] = {}
    for name in LOOPS:
        values = [each for episode in episodes for each in episode.reactions_ms.get(name, ())]
        if values:
            found[name] = {**percentiles(values), "count": len(values), "histogram": histogram(values)}
    return found
