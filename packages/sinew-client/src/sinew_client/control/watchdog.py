"""Hold the robot if its control loop is late, from a separate thread that a slow camera or bus cannot block."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable

from sinew_client.control.facts import facts_of

logger = logging.getLogger(__name__)

PERIODS = 2.0  # the watchdog holds the robot after this many periods without a command or a hold
LEAST_S = 0.01  # shortest time limit in seconds, because a thread cannot measure a shorter wait precisely


class Watchdog:
    """Holds the robot if the loop sends neither a command nor a hold for two periods, and then once per period.

    The loop calls :meth:`claim` before each command or hold, and :meth:`sent` after it. ``claim`` waits until a hold in
    progress has ended, and reserves the robot for two periods. So the watchdog overrides a newer command only if
    sending this command takes longer than that.

    Use the object in a ``with`` block. Outside the block it never holds the robot, and only measures gaps.

    The watchdog's thread is blocked too if a call does not release Python's interpreter lock (GIL), or by SIGSTOP.

    Args:
        hold: Function that holds the robot. The watchdog calls it from its own thread.
        period: Seconds between two commands.
        active: False never holds the robot.
        now: The clock: a function that returns seconds.

    Attributes:
        holds: Number of holds by the watchdog.
        failures: Number of calls of ``hold`` that raised an exception.
        longest: Longest gap between commands or holds, seconds.
    """

    def __init__(
        self,
        hold: Callable[[], None],
        period: float,
        active: bool = True,
        now: Callable[[], float] = time.monotonic,
    ):
        self._hold, self._period, self._now, self.active = hold, period, now, active
        self.limit = max(PERIODS * period, LEAST_S)
        self.holds = self.failures = 0
        self.longest = 0.0
        # The watchdog's thread locks this while it decides on a hold and sends the hold.
        self._lock = threading.Lock()
        self._due = 0.0  # time at which the watchdog holds the robot, seconds
        self._last: float | None = None  # time of the last command or hold, seconds
        self._held = False  # True if the watchdog has held the robot since the last `claim`
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        self._last = None
        self._due = self._now() + self.limit
        if self.active:
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._run, name="sinew-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)  # wait at most 1 s, because a robot's `hold` may never return

    def claim(self) -> bool:
        """Reserve the robot for a command of the loop. Return True if the watchdog held it since the last call."""
        with self._lock:
            held, self._held = self._held, False
            self._note()
            self._due = self._now() + self.limit
        return held

    def sent(self) -> None:
        """Record that the loop has sent its command or hold."""
        with self._lock:
            self._due = self._now() + self.limit

    def _note(self) -> None:
        now = self._now()
        if self._last is not None:
            self.longest = max(self.longest, now - self._last)
        self._last = now

    def _run(self) -> None:
        ended = self._ended
        while True:
            with self._lock:
                if self._due <= self._now() and not ended.is_set():
                    self._watched()
                wait = self._due - self._now()
            if ended.wait(min(wait, self.limit)):
                return

    def _watched(self) -> None:
        """Hold the robot. The caller must have locked ``_lock`` before."""
        if not self._held:
            logger.warning("no command for %.3g s: the watchdog holds the robot", self.limit)
        self._held = True
        self._note()
        self.holds += 1
        try:
            self._hold()
        except BaseException:
            self.failures += 1
            if self.failures == 1:
                logger.exception("the watchdog could not hold the robot")
        self._due = self._now() + self._period


def watchdog_of(robot: Any, period: float, wanted: bool, real: bool) -> Watchdog:
    """Create the watchdog of a robot.

    Args:
        robot: The robot. If its ``concurrent_hold`` is False, the watchdog never holds it.
        period: Seconds between two commands.
        wanted: The setting ``watchdog``; False never holds the robot.
        real: True if the loop runs on the machine's clock. With simulated time, the watchdog never holds the robot.

    Returns:
        The watchdog.
    """
    return Watchdog(robot.hold, period, wanted and real and facts_of(robot).concurrent_hold)
