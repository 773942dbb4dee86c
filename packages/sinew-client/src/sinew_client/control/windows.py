"""The controller for a stream: windows of waypoints arrive without requests, and replace coming waypoints."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from sinew_client.control.blend import Fusion
from sinew_client.control.controller import AHEAD_S, PAUSED, BaseController, Command
from sinew_client.control.delay import DelayEstimate
from sinew_client.control.motion import Motion
from sinew_client.control.player import ChunkRequest
from sinew_client.control.reaction import Reactions
from sinew_client.control.safety import Guard, RowsError, checked_rows
from sinew_client.control.trajectory import Node, Trajectory

if TYPE_CHECKING:
    from sinew_client.streams import StreamWindow

logger = logging.getLogger(__name__)

LONGEST_REASON = 400  # longest logged reason of a failure, characters
WINDOWS = 256  # the controller stores the times of this many newest windows
PREFIXES = 10_000  # the report contains the ages of at most this many action prefixes
# The estimated delay is at most this many waypoints. After a stall, a larger estimate would make the next windows begin
# too far in the future.
MAX_DELAY = 1000
NO_WINDOW, OUT_OF_NODES, OLD_FRAME, BLIND = (
    "no window yet",
    "out of nodes",
    "the newest frame is too old",
    "the robot is blind",
)


class StreamController(BaseController):
    """Executes one waypoint of the stream per control step. Times are seconds since the first tick.

    If an observation is missing, the robot holds in that step, but the waypoints stay. A window is invalid in these
    cases:

    * It has more than ``max_rows`` waypoints, or a waypoint is not ``dim`` finite numbers.
    * It begins too far in the future.
    * It states a time of its sample or frame that is in the future.

    Args:
        fusion: How new waypoints are mixed with old ones.
        hz: Waypoints per second.
        stale: Largest age of the frame of an executed waypoint, seconds. With an older frame, the robot holds.
        motion: The motion, which gives the robot's position before its first command.
        guard: The check of each command against the limits.
        dim: Number of values in a command (D).
        max_rows: Largest number of waypoints in a window.

    Attributes:
        windows: Number of valid windows.
        bad: Number of invalid windows.
        misses: Number of steps without a waypoint after the first window.
        frames_used: Number of frames from which a window was computed.
        newest: The newest window; None before the first.
        reactions: The times of the executed waypoints, for the report.
    """

    continuous = True
    starting = NO_WINDOW

    def __init__(
        self,
        fusion: Fusion,
        hz: float,
        stale: float,
        motion: Motion,
        guard: Guard,
        dim: int,
        max_rows: int,
    ):
        super().__init__(Trajectory(), motion, DelayEstimate(), guard, dim, max_rows)
        self.hz, self.stale, self._fusion = hz, stale, fusion
        self.windows = self.bad = self.misses = self.frames_used = 0
        self.reactions = Reactions()
        self.newest: StreamWindow | None = None
        self.prefix_ages: list[float] = []
        # The newest windows are stored by their number, which counts the windows in the order of arrival.
        self._about: OrderedDict = OrderedDict()
        self._asked = -1  # control step of the newest sample that was sent
        self._time = -math.inf  # time of the newest sample that was sent, seconds since the first tick
        # Windows that were computed from frames up to this time belong to an earlier episode.
        self._world = -math.inf
        self._blind = (-1, "")  # the last control step without a usable observation, and the reason
        self._failing = ""  # the last error; "" after a window from a new frame

    @property
    def chunks(self) -> int:
        return self.windows

    @property
    def said(self) -> str:
        return "" if self.newest is None else self.newest.said

    def wants_chunk(self, step: int) -> bool:
        return not self.paused

    def wants_position(self, step: int) -> bool:
        return self._blind[0] != step and super().wants_position(step)

    def ask(
        self,
        step: int,
        frame: int,
        state: np.ndarray | None = None,
        time: float = 0.0,
        frame_time: float = 0.0,
    ) -> ChunkRequest:
        """Record that a sample (the robot's state) is sent, and compute its fields: its times, and the expected delay
        in waypoints. The arguments are those of :meth:`BaseController.ask`.
        """
        self._tell("ask", {"step": step, "frame": frame, "state": state, "time": time})
        self._asked, self._time = step, time
        delay = max(1, self.delay.steps)
        return ChunkRequest(
            step, frame, state, {"time": time, "frame_time": min(frame_time, time), "delay": delay}
        )

    def arrived(self, step: int, answer: StreamWindow) -> bool:
        """Process a window of the stream. Return True if the window is valid."""
        try:
            rows = self._checked(answer, step)
        except RowsError as error:
            self.broken(step, str(error))
            return False
        self._tell(
            "window",
            {
                "step": step,
                "first": answer.step,
                "rows": rows,
                "sample_time": answer.sample_time,
                "frame_time": answer.frame_time,
            },
        )
        self.windows += 1
        self.unanswered = 0
        if self.newest is not None and answer.sample_time < self.newest.sample_time:
            # This window belongs to a stream that was replaced. It must not overwrite newer waypoints.
            return True
        self.delay.add(min(step - int(answer.sample_time * self.hz + 1e-6), MAX_DELAY))
        if answer.frame_time > self._world:
            self._put(answer, rows)
        return True

    def failed(self, step: int, reason: str, kind: str = "") -> None:
        """Record an error message of the server. The robot executes the remaining waypoints, and then holds."""
        super().failed(step, reason, kind)
        self._fails(reason)

    def broken(self, step: int, reason: str) -> None:
        super().broken(step, reason)
        self.bad += 1
        self._fails(reason)

    def fault(self, step: int, reason: str, moved: bool = False) -> None:
        """Hold the robot in this control step.

        Args:
            step: The control step.
            reason: Why the robot holds.
            moved: True if the scene has changed, as in a new episode. The robot then holds until a window has a newer
                frame.
        """
        self._tell("fault", {"step": step, "reason": reason, "moved": moved})
        if not moved:
            self._blind = (step, reason or BLIND)
            return
        self._leaves_alone()
        self._drop()
        self._fault = reason
        if self.guard is not None:
            self.guard.start(None)

    def leaves(self, command: Command, time: float) -> None:
        about = self._about[command.chunk]
        self.reactions.add(time, about.sample_time, about.frame_time)

    def _drop(self) -> None:
        self.trajectory.clear()
        self._world, self._failing = self._time, ""

    def _fails(self, reason: str) -> None:
        if reason[:LONGEST_REASON] != self._failing:
            logger.warning("%s", reason)
        self._failing = reason[:LONGEST_REASON]

    def _checked(self, window: StreamWindow, step: int) -> np.ndarray:
        """Check a window, and return its waypoints, float32 [K, D].

        Raises:
            RowsError: The window is not valid.
        """
        rows = checked_rows(window.rows, self.dim, self.max_rows, least=0, what="a window")
        now, reach = max(0.0, self._time) + AHEAD_S, step + self.hz * AHEAD_S + MAX_DELAY
        if not (0.0 <= window.sample_time <= now and -math.inf < window.frame_time <= now):
            raise RowsError(
                f"a window: expected times of its sample and its frame up to the present, {now:.3f} s, got"
                f" {window.sample_time:g} and {window.frame_time:g}"
            )
        if not window.step <= reach:
            raise RowsError(
                f"a window: expected its first waypoint to be at most {int(reach)}, got {window.step}"
            )
        return rows

    def _put(self, window: StreamWindow, rows: np.ndarray) -> None:
        """Mix the waypoints of a window, float32 [K, D], with the stored waypoints."""
        if self.newest is None or window.frame_time > self.newest.frame_time:
            self._failing = ""
            self.frames_used += 1
        self.newest, self._fault = window, ""
        number = self.windows
        self._about[number] = window
        while len(self._about) > WINDOWS:
            self._about.popitem(last=False)
        if math.isfinite(window.prefix_age_ms):
            self.prefix_ages.append(window.prefix_age_ms)
        del self.prefix_ages[:-PREFIXES]
        nodes = [Node(window.step + k, row, window.step, number, k) for k, row in enumerate(rows)]
        fused = self.trajectory.fused(nodes, self._fusion)
        self.trajectory.cut(window.step)
        self.trajectory.put(fused)

    def _planned(self, step: int, state: np.ndarray | None) -> Command:
        node = self.trajectory.take(step)
        if self.paused:
            return Command(step, None, PAUSED)
        if self._blind[0] == step:
            return Command(step, None, self._blind[1])
        if self._asked != step:
            return Command(step, None, BLIND)
        if node is None:
            self.misses += bool(self.windows)
            why = self._failing or self._fault or (OUT_OF_NODES if self.windows else NO_WINDOW)
            return Command(step, None, why)
        about = self._about.get(node.chunk)
        if about is None or self._time - about.frame_time > self.stale:
            return Command(step, None, self._failing or OLD_FRAME)
        age = max(0, int((self._time - about.frame_time) * self.hz + 1e-6))
        return self._guarded(step, node.row, age, node.chunk, node.index)
