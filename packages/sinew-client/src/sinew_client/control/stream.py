"""A stream as the source of actions for a control loop.

In every tick the client sends the robot's state (a sample), and new frames if there are any. The server sends windows
of waypoints without requests.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Protocol

import numpy as np

from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.interfaces import NoObservation
from sinew_client.control.loop import Loop
from sinew_client.control.report import percentiles
from sinew_client.control.requester import Outcome
from sinew_client.control.windows import StreamController
from sinew_client.faults import Faults

if TYPE_CHECKING:
    from sinew_client.streams import StreamWindow


class LinkProtocol(Protocol):
    """The transport of a stream: :class:`sinew_client.streams.StreamLink`, or a substitute without a socket.

    Attributes:
        errors: Number of error messages that arrived in place of windows.
        error: Text of the last error message.
        faults: Errors that are not part of normal operation.
    """

    label: str
    errors: int
    error: str
    faults: Faults

    def send(
        self,
        state: Any,
        time: float,
        delay: int = 1,
        images: Any = None,
        frame_time: Any = None,
        prompt: str = "",
    ) -> bool: ...
    def windows(self) -> list[StreamWindow]: ...

    def restart(self) -> None:
        """Begin a new stream with the next sample, so that the server forgets all earlier samples and frames."""

    def close(self) -> None: ...


class Stream:
    """A source of actions for a control loop (:class:`~sinew_client.control.interfaces.Source`): windows of a stream.

    ``Settings.fusion`` states how a window is mixed with the old waypoints. An observation without ``images`` means
    that there is no newer frame.

    Args:
        link: The connection to the server.

    Attributes:
        frames: Number of observations with frames that were sent.
    """

    continuous = True

    def __init__(self, link: LinkProtocol):
        self.link, self.frames = link, 0
        # These outcomes arrived at the last poll of the link. None marks their end.
        self._come: deque[Outcome | None] = deque()
        # `_told` is the number of errors that this source has reported, and `_kinds` counts their kinds.
        self._told, self._kinds = 0, Counter()  # type: ignore[var-annotated]

    @property
    def failures(self) -> int:
        return self.link.errors

    def ready(self, now: float) -> bool:
        return True

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        images = observation.get("images")
        self.frames += images is not None
        self.link.send(
            np.asarray(observation["state"], np.float32),
            observation["time"],
            observation["delay"],
            images,
            None if images is None else observation["frame_time"],
            observation.get("prompt", ""),
        )

    def poll(self, now: float) -> Outcome | None:
        if not self._come:
            self._come.extend(Outcome(window) for window in self.link.windows())
            self._come.extend(self._errors())
            self._come.append(None)
        return self._come.popleft()

    def cancel(self) -> None:
        """Begin a new stream with the next sample."""
        self.link.restart()

    def close(self, wait: float = 0.0) -> None:
        self.link.close()

    def _errors(self) -> Iterator[Outcome]:
        """Yield the errors since the last call as failed outcomes.

        The link counts errors, but stores only the texts of the first fault and of the last error. So most outcomes
        have the text of the last error. Another thread may add an error at the same time.
        """
        link = self.link
        errors = link.errors  # read once, because an error between two reads would never be returned
        fresh, self._told = errors - self._told, errors
        if not fresh:
            return
        # Copy the counts at once, because a kind that another thread adds would end an iteration with an exception.
        kinds = list((Counter(link.faults.counts) - self._kinds).elements())[:fresh]
        texts = [link.error] * fresh
        if kinds and not self._kinds:
            texts[0] = link.faults.first
        self._kinds.update(kinds)
        for text, kind in zip(texts, kinds + [""] * (fresh - len(kinds))):
            yield Outcome(reason=text, kind=kind)


class Watching:
    """A wrapper around a robot for a stream: it returns frames at the rate of the cameras, and only the state between.

    If the robot has a method ``sense``, which returns only the state, float [S], the wrapper uses it between frames.

    Args:
        robot: The robot.
        camera_hz: Frames per second.
        now: The clock: a function that returns seconds.
    """

    def __init__(self, robot: Any, camera_hz: float, now: Callable[[], float] = time.monotonic):
        self.robot, self._period, self._now = robot, 1.0 / camera_hz, now
        self._due = float("-inf")  # time at which the next frame must be sent, seconds
        self.act, self.hold = robot.act, robot.hold
        self._facts = facts_of(robot)

    def facts(self) -> RobotFacts:
        """Return the facts of the robot itself."""
        return self._facts

    def observe(self) -> Mapping[str, Any]:
        """Observe the robot: with frames if a frame is due, else only its state.

        If a frame is due but the robot has none, the field ``blind`` has the reason.
        """
        if self._facts.sense is not None:
            seen, state = None, self._facts.sense()
        else:
            seen = self.robot.observe()
            state = seen["state"]
        now = self._now()
        # Return only the state if no frame is due yet. If the wait is longer than a period, the clock was set back, so
        # send a frame at once.
        if now < self._due - 1e-6 and self._due - now <= self._period:
            return {"state": state}
        # If the robot has no frame now, `_due` stays unchanged, so that the next call tries again.
        try:
            seen = self.robot.observe() if seen is None else seen
        except NoObservation as reason:
            return {"state": state, "blind": str(reason)}
        following = self._due + self._period
        # Skip the frames whose time has passed already. Sending several frames at once would not help the policy.
        self._due = following if following > now else now + self._period
        return {**seen, "state": state}


@dataclass(frozen=True)
class StreamReport:
    """The report of a run with a stream. Distributions are dicts with p50, p95, p99 and max.

    Attributes:
        rate: Planned rate of the waypoints, Hz.
        seconds: Time from the first tick to the last tick, seconds.
        ticks: Number of ticks.
        tick_hz: Achieved rate of the ticks, Hz.
        late: Number of ticks that began more than half a period late.
        skipped: Number of periods without a tick.
        windows: Number of valid windows.
        window_hz: Rate of the windows, Hz.
        frames: Number of frames that were sent.
        frames_used: Number of frames from which a window was computed. Newer frames replaced the other frames.
        misses: Number of ticks without a waypoint after the first window.
        delay: Number of waypoints from a sample to the first waypoint that its window can change.
        label: The server's method to compute windows.
        held: Number of ticks with a hold, by reason.
        clipped: Number of commands that a limit changed.
        measured: Reaction times, ages and lateness, ms.
        executed: Number of ticks with a waypoint.
        errors: Number of error messages in place of windows, plus the number of invalid windows.
        error: Text of the last error.
        faults: Errors that are not part of normal operation (:class:`~sinew_client.faults.Faults`).
        watchdog: True if a watchdog watched the loop.
        watchdog_holds: Number of holds by the watchdog.
        longest_gap_ms: Longest gap between two commands or holds, ms.
    """

    rate: float
    seconds: float
    ticks: int
    tick_hz: float
    late: int
    skipped: int
    windows: int
    window_hz: float
    frames: int
    frames_used: int
    misses: int
    delay: int
    label: str
    held: dict[str, int]
    clipped: int
    measured: dict[str, Any]
    executed: int
    errors: int
    error: str
    faults: dict[str, Any]
    watchdog: bool
    watchdog_holds: int
    longest_gap_ms: float

    @classmethod
    def of(cls, loop: Loop) -> StreamReport:
        """Create the report about the run of a loop so far. The loop's source must be a :class:`Stream`."""
        run, source, player = loop.report(), loop.source, loop.controller
        assert isinstance(source, Stream)
        assert isinstance(player, StreamController)
        measured = {**player.reactions.summary(), "prefix_age_ms": percentiles(player.prefix_ages)}
        return cls(
            rate=loop.settings.hz,
            seconds=run.seconds,
            ticks=run.steps,
            tick_hz=round(run.steps / run.seconds, 2) if run.seconds else 0.0,
            late=run.late,
            skipped=run.skipped,
            windows=player.windows,
            window_hz=round(player.windows / run.seconds, 2) if run.seconds else 0.0,
            frames=source.frames,
            frames_used=player.frames_used,
            misses=player.misses,
            delay=max(1, player.delay.steps),
            label=source.link.label,
            held=run.held,
            clipped=run.clipped_commands,
            measured={**measured, "tick_lateness_ms": run.jitter_ms},
            executed=run.executed,
            errors=source.failures + player.bad,
            error=source.link.error or player.faults.first,
            faults=run.faults,
            watchdog=run.watchdog,
            watchdog_holds=run.watchdog_holds,
            longest_gap_ms=run.longest_gap_ms,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
