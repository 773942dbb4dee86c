"""Hold the robot if its loop is late, from a thread that no camera and no bus can block."""

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
    """Calls ``hold`` if the loop sent neither a command nor a hold for two periods, and then once per period.

    The loop calls :meth:`claim` before each command or hold, and :meth:`sent` after it. ``claim`` waits for a hold in
    progress, and no hold begins for the next two periods. So a hold follows a newer command only if sending that
    command takes longer. Use the object in a ``with`` block to watch the robot. Without it, gaps are counted and
    nothing is held.

    A long call that keeps the interpreter's lock, and SIGSTOP, block this thread as well.

    Args:
        hold: Holds the robot; called from the watchdog's thread.
        period: Seconds between two commands.
        active: False never holds.

    Attributes:
        holds: Number of holds.
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
        """Reserve the robot for a command or a hold. Return True if the watchdog held it since the last claim."""
        with self._lock:
            held, self._held = self._held, False
            self._note()
            self._due = self._now() + self.limit
        return held

    def sent(self) -> None:
        """Record that the command or hold has been sent."""
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
        """Hold the robot. The caller has the lock."""
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
    """Create the watchdog of a robot. It is active if the robot allows it (``concurrent_hold``).

    Args:
        robot: The robot.
        period: Seconds between two commands.
        wanted: The setting ``watchdog``.
        real: True if the loop runs on the machine's clock.
    """
    return Watchdog(robot.hold, period, wanted and real and facts_of(robot).concurrent_hold)
