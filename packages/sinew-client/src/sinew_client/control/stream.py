"""The robot's loop of a stream: at every tick a sample goes out and a node is executed; frames go when they come."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Mapping, Protocol

import numpy as np

from sinew_client.control.blend import parse_fusion
from sinew_client.control.controller import OTHER, REASONS
from sinew_client.control.delay import DelayEstimate
from sinew_client.control.loop import AHEAD_S, OTHER_CLOCK, Blind, Stopped, float_of
from sinew_client.control.motion import Motion, Relative, parse_motion
from sinew_client.control.pace import Pace
from sinew_client.control.reaction import Reactions
from sinew_client.control.report import percentiles
from sinew_client.control.safety import Guard, Limits, RowsError, checked_rows
from sinew_client.control.settings import SettingsError, check_start
from sinew_client.control.trajectory import Node, Trajectory
from sinew_client.control.watchdog import watchdog_of
from sinew_client.errors import Refused
from sinew_client.faults import MISFITS, Faults
from sinew_client.protocol import MAX_ROWS

if TYPE_CHECKING:
    from sinew_client.streams import StreamWindow

logger = logging.getLogger(__name__)

LONGEST_REASON = 400  # characters
WINDOWS = 256  # of which the origin of nodes is remembered
MAX_DELAY = 1000  # nodes: what a longer stall measures would only keep windows out of reach after it
NO_WINDOW, OUT_OF_NODES, OLD_FRAME, NOT_FINITE, BLIND = (
    "no window yet",
    "out of nodes",
    "the newest frame is too old",
    "the state is not finite",
    "the robot is blind",
)


class StreamRobot(Protocol):
    """The methods that a stream calls on a robot; each should return well within a tick. From which threads, and what
    ``concurrent_hold`` means, is said at :class:`~sinew_client.control.loop.Robot`.

    ``sense`` and ``look`` raise :class:`~sinew_client.control.loop.Blind` where there is nothing that may be acted on.
    """

    def sense(self) -> np.ndarray:
        """Return the state, float [S]: the numbers of the sensors that are fast."""

    def look(self) -> Mapping[str, Any] | None:
        """Return ``images`` and, where known, ``age`` (seconds since their exposure); None if there is no newer
        frame."""

    def act(self, row: np.ndarray) -> None:
        """Send one command, float32 [D]."""

    def hold(self) -> None:
        """Stay where you are."""


class LinkProtocol(Protocol):
    """The transport of a stream: :class:`sinew_client.streams.StreamLink`, or the same thing without a socket.

    errors, error: how many messages came in place of windows, and what the last one says; faults: those that are no
    part of normal life.
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
        """Let the next sample begin a stream that knows nothing of what was before."""


class Watching:
    """Makes a :class:`StreamRobot` of a :class:`~sinew_client.control.loop.Robot`: every tick its state, and its frames
    ``camera_hz`` times a second. A robot with a method ``sense`` is asked for that instead of an observation."""

    def __init__(self, robot: Any, camera_hz: float, now: Callable[[], float] = time.monotonic):
        self.robot, self._period, self._now = robot, 1.0 / camera_hz, now
        self._due = float("-inf")  # when the next frame is to go out
        self._seen: Mapping[str, Any] | None = None
        self.act, self.hold = robot.act, robot.hold
        self.concurrent_hold = getattr(robot, "concurrent_hold", True)

    def sense(self) -> np.ndarray:
        self._seen = None
        if hasattr(self.robot, "sense"):
            return self.robot.sense()
        self._seen = self.robot.observe()
        return self._seen["state"]

    def look(self) -> Mapping[str, Any] | None:
        now = self._now()
        if now < self._due - 1e-6 and self._due - now <= self._period:  # more: the clock was set back
            return None
        seen = self._seen if self._seen is not None else self.robot.observe()  # blind: due until there is one
        following = self._due + self._period
        self._due = following if following > now else now + self._period  # what was missed is not made up for
        return seen


@dataclass(frozen=True)
class StreamReport:
    """How a stream went. Rates per second; ``misses``: ticks without a node after the first window; ``held``: by
    reason.

    delay: nodes from a sample to the first node that its window can reach. executed: ticks with a node. errors:
    messages that came in place of windows, and windows that could not be taken, of which ``faults`` are no part of
    normal life (:class:`~sinew_client.faults.Faults`). watchdog: True if one watched the loop; watchdog_holds: holds
    that it gave, and longest_gap_ms: between two of all commands and holds. Times in milliseconds, p50 to max.
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
    misses: int
    delay: int
    label: str
    held: dict[str, int] = field(default_factory=dict)
    clipped: int = 0
    measured: dict[str, Any] = field(default_factory=dict)
    executed: int = 0
    errors: int = 0
    error: str = ""
    faults: dict[str, Any] = field(default_factory=dict)
    watchdog: bool = False
    watchdog_holds: int = 0
    longest_gap_ms: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class StreamLoop:
    """Runs a robot on a stream until :meth:`stop`. ``rate``: ticks, samples and nodes per second.

    fusion: how windows are fused (:func:`~sinew_client.control.blend.parse_fusion`). stale: seconds beyond which
    the frame that a node was made from is too old to act on; the robot holds then. watch: called after every tick.
    motion: what nodes are measured from (:func:`~sinew_client.control.motion.parse_motion`); they go out as they come,
    and it says where the robot is before its first command. max_rows: nodes of a window. watchdog: hold the robot
    from another thread where the loop is late by two ticks, as :class:`~sinew_client.control.loop.Loop` does.

    A window counts as failed where it has other rows than up to ``max_rows`` of ``dim`` finite numbers, begins at no
    node that the delay can reach, or knows a sample or frame of the time to come.

    Raises :class:`~sinew_client.control.settings.SettingsError` for limits of velocity or acceleration that nothing
    says where to begin with.
    """

    def __init__(
        self,
        robot: StreamRobot,
        link: LinkProtocol,
        rate: float,
        dim: int,
        prompt: str = "",
        fusion: str = "latest_only",
        limits: Mapping[str, Any] | None = None,
        stale: float = 0.5,
        pace: Pace | None = None,
        watch: Callable[[StreamLoop], None] | None = None,
        motion: Mapping[str, Any] | None = None,
        max_rows: int = MAX_ROWS,
        watchdog: bool = True,
    ):
        self.dim, self.max_rows, self._motion = dim, max_rows, _parsed(motion)
        self.robot, self.link, self.rate, self.prompt, self.stale = robot, link, rate, prompt, stale
        self.trajectory, self._fusion = Trajectory(), parse_fusion(fusion)
        self.pace = pace or Pace(1.0 / rate)
        found = Limits.parse(limits, dim) if limits is not None else None
        if found is not None:
            check_start(found, self._motion)
        self.guard = Guard(found, 1.0 / rate, self._motion.still(dim))
        self.watchdog = watchdog_of(robot, self.pace.period, watchdog, self.pace.real)
        self.faults = Faults()  # windows that could not be taken
        self.reactions, self.delay = Reactions(), DelayEstimate(initial=1)
        self.held: Counter = Counter()
        self.windows = self.frames = self.ticks = self.clipped = self.misses = self.executed = 0
        self.reason = ""  # why the robot holds
        self.state: np.ndarray | None = None
        self.images: Mapping[str, Any] = {}
        self.newest: StreamWindow | None = None
        self.prefix_ages: list[float] = []
        self._about: OrderedDict = OrderedDict()  # number of a window, as it came -> the window
        self._watch, self._ended = watch, threading.Event()
        self._step: int | None = None  # of the present tick
        self._world = float("-inf")  # when the present one began: what was seen before is of another one
        self._waits = ""  # why there are no nodes yet
        self._errors, self._failing = 0, ""  # of the link: those seen, and the last one since there was news

    # ------------------------------------------------------------------------- from any thread

    def stop(self) -> None:
        """End after the present tick; the robot holds."""
        self._ended.set()

    def say(self, prompt: str) -> None:
        """Change the instruction in mid-stream: windows follow it from the next prefix on."""
        self.prompt = prompt

    @property
    def stopped(self) -> bool:
        """Return True if :meth:`stop` has ended the run, and not its length or the robot."""
        return self._ended.is_set()

    def restart(self, reason: str, prompt: str = "") -> None:
        """Drop what is planned and windows under way, and hold until one knows a newer frame: the world is another
        one, such as a new episode's, with an instruction of its own where there is one. The server begins anew. From
        the loop's own thread."""
        self.prompt = prompt or self.prompt
        self.trajectory.clear()
        self._about.clear()
        self.guard.start(None)
        if self._step is not None:
            self._world = self._time(self._step)
        self.reason = self._waits = reason
        self._failing = ""
        self.link.restart()

    def seen(self) -> tuple[str, Mapping[str, Any]] | None:
        """Return the instruction and the newest observation, for a planner; None before there is one. ``said`` in it is
        the last text of the policy's language head, where one was asked for."""
        if self.state is None or not self.images:
            return None
        said = self.newest.said if self.newest is not None else ""
        return self.prompt, {"images": self.images, "state": self.state, **({"said": said} if said else {})}

    # ------------------------------------------------------------------------- the loop

    def run(self, ticks: int | None = None) -> StreamReport:
        """Run until so many ticks were begun, or until stopped. Raises :class:`~sinew_client.errors.Refused` where what
        the robot shows is refused before there was any window: it has not moved, and the next one would fare no better.
        """
        try:
            with self.watchdog:
                while not self._ended.is_set() and (ticks is None or self.ticks < ticks):
                    self.tick(self.pace.next())
        except Stopped:
            pass
        finally:
            self.robot.hold()
        return self.report()

    def tick(self, step: int) -> None:
        """Do what is due in one tick: take windows, send a sample, execute the node of ``step``."""
        self.ticks += 1
        if self._step is not None and step > self._step + 1:
            self.guard.skipped()
        self._step = step
        for window in self.link.windows():
            self._take(window, step)
        self._listen()
        time = self._time(step)
        try:
            reason = self._sense(time)
        except Blind as blind:
            reason = str(blind) or BLIND
        if self.watchdog.claim():
            self.guard.held()
        if reason:
            self._hold(step, reason)
        else:
            self._execute(step, time)
        self.watchdog.sent()
        if self._watch is not None:
            self._watch(self)

    def _listen(self) -> None:
        """Take note of errors that came in place of windows."""
        if self.link.errors == self._errors:
            return
        self._errors, faults = self.link.errors, self.link.faults
        if not self.windows and any(kind in MISFITS for kind in faults.counts):
            raise Refused(faults.first)
        if self.link.error != self._failing:
            logger.warning("%s", self.link.error)
        self._failing = self.link.error[:LONGEST_REASON]

    def _time(self, step: int) -> float:
        """Return seconds since the first tick, never before this tick was due."""
        return max(step / self.rate, self.pace.now() - self.pace.due(0))

    def _sense(self, time: float) -> str:
        """Send what the robot senses; return why it cannot be acted on, "" if it can. Raises Blind."""
        self.state = state = np.asarray(self.robot.sense(), np.float32)
        if not np.all(np.isfinite(state)):
            return NOT_FINITE
        try:
            seen = self.robot.look()
        except Blind:
            self._send(state, time, None)
            raise
        self._send(state, time, seen)
        return ""

    def _send(self, state: np.ndarray, time: float, seen: Mapping[str, Any] | None) -> None:
        delay = max(1, self.delay.steps)
        if seen is None:
            self.link.send(state, time, delay, prompt=self.prompt)
            return
        age = self._age(seen)
        if not -AHEAD_S <= age < math.inf:
            raise Blind(OTHER_CLOCK + f"{age:.3g} s old")
        self.frames += 1
        self.images = seen["images"]
        self.link.send(state, time, delay, seen["images"], time - max(0.0, age), self.prompt)

    def _age(self, seen: Mapping[str, Any]) -> float:
        """Return how many seconds ago a frame was exposed; none where the robot does not say."""
        if seen.get("age"):
            return float_of(seen["age"])
        return self.pace.now() - float_of(seen["time"]) if seen.get("time") else 0.0

    def _take(self, window: StreamWindow, step: int) -> None:
        """Take a window; one that nothing may be made of counts as failed."""
        try:
            rows = self._checked(window, step)
        except RowsError as error:
            self.faults.add(error.code, str(error))
            if str(error) != self._failing:
                logger.warning("%s", error)
            self._failing = str(error)
            return
        self.windows += 1
        if self.newest is not None and window.sample_time < self.newest.sample_time:
            return  # a stream that was replaced: never older news over newer
        self.delay.add(min(step - int(window.sample_time * self.rate + 1e-6), MAX_DELAY))
        if window.frame_time <= self._world:
            return
        if self.newest is None or window.frame_time > self.newest.frame_time:
            self._failing = ""
        self.newest, self._waits = window, ""
        number = self.windows
        self._about[number] = window
        while len(self._about) > WINDOWS:
            self._about.popitem(last=False)
        if math.isfinite(window.prefix_age_ms):
            self.prefix_ages.append(window.prefix_age_ms)
        del self.prefix_ages[:-10_000]
        nodes = [Node(window.step + k, row, window.step, number, k) for k, row in enumerate(rows)]
        fused = self.trajectory.fused(nodes, self._fusion)
        self.trajectory.cut(window.step)
        self.trajectory.put(fused)

    def _checked(self, window: StreamWindow, step: int) -> np.ndarray:
        """Return the rows of a window, float32 [K, D]. Raises :class:`RowsError`."""
        rows = checked_rows(window.rows, self.dim, self.max_rows, least=0, what="a window")
        now, reach = self._time(step) + AHEAD_S, step + self.rate * AHEAD_S + MAX_DELAY
        if not (0.0 <= window.sample_time <= now and -math.inf < window.frame_time <= now):
            raise RowsError(
                f"a window: expected times of sample and frame up to {now:.3f} s, got {window.sample_time:g} and"
                f" {window.frame_time:g}"
            )
        if not window.step <= reach:
            raise RowsError(f"a window: expected to begin up to node {int(reach)}, got {window.step}")
        return rows

    def _execute(self, step: int, time: float) -> None:
        node = self.trajectory.take(step)
        if node is None:
            self.misses += bool(self.windows)
            why = self._failing or self._waits or (OUT_OF_NODES if self.windows else NO_WINDOW)
            self._hold(step, why, taken=True)
            return
        about = self._about.get(node.chunk)
        if about is None or time - about.frame_time > self.stale:
            self._hold(step, self._failing or OLD_FRAME, taken=True)
            return
        if not self.guard.known and self.state is not None:
            self.guard.start(self._motion.position(self.state, self.dim))
        verdict = self.guard.check(node.row)
        self.clipped += bool(verdict.clipped)
        if verdict.row is None:
            self._hold(step, verdict.reason, taken=True)
            return
        self.reason = ""
        self.executed += 1
        self.reactions.add(
            self._time(step), about.sample_time, about.frame_time
        )  # before: acting may take its time
        self.robot.act(verdict.row)

    def _hold(self, step: int, reason: str, taken: bool = False) -> None:
        if not taken:
            self.trajectory.take(step)
        self.reason = reason
        self.held[reason if reason in self.held or len(self.held) < REASONS else OTHER] += 1
        self.guard.held()
        self.robot.hold()

    # ------------------------------------------------------------------------- report

    def report(self) -> StreamReport:
        seconds = (self.pace.ticks + self.pace.skipped) / self.rate
        measured = {**self.reactions.summary(), "prefix_age_ms": percentiles(self.prefix_ages)}
        measured["tick_lateness_ms"] = percentiles(1e3 * each for each in self.pace.lateness)
        return StreamReport(
            rate=self.rate,
            seconds=round(seconds, 3),
            ticks=self.ticks,
            tick_hz=round(self.ticks / seconds, 2) if seconds else 0.0,
            late=self.pace.late,
            skipped=self.pace.skipped,
            windows=self.windows,
            window_hz=round(self.windows / seconds, 2) if seconds else 0.0,
            frames=self.frames,
            misses=self.misses,
            delay=max(1, self.delay.steps),
            label=self.link.label,
            held=dict(self.held),
            clipped=self.clipped,
            measured=measured,
            executed=self.executed,
            errors=self.link.errors + self.faults.total,
            error=self.link.error or self.faults.first,
            faults=self.link.faults.and_those(self.faults).to_dict(),
            watchdog=self.watchdog.active,
            watchdog_holds=self.watchdog.holds,
            longest_gap_ms=round(1e3 * self.watchdog.longest, 3),
        )


def _parsed(motion: Mapping[str, Any] | None) -> Motion:
    """Return what nodes are measured from, which nothing is added to here. Raises SettingsError."""
    try:
        found = parse_motion(motion)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return Motion() if isinstance(found, Relative) else found
