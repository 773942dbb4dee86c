"""A hold where a loop is late: from a thread beside it, which no camera and no bus keeps waiting."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable

from sinew_client.control.facts import facts_of

logger = logging.getLogger(__name__)

PERIODS = 2.0  # without a command or a hold before a robot is held
LEAST_S = 0.01  # a thread does not keep shorter times


class Watchdog:
    """Calls ``hold`` when a loop has given no command and no hold for two periods, and once a period from then on.

    The loop calls :meth:`claim` before each command or hold, and :meth:`sent` after it. A hold that is under way then
    is waited for, and for two periods none begins: so none lands after a newer command, but where sending that very
    command takes longer. ``with`` this object the robot is watched; without, gaps are counted and nothing is held.

    hold: called from a thread of its own. period: seconds between two commands. active: False never holds.
    holds: how many there were. longest: seconds, of a gap between two of commands and holds. What keeps the
    interpreter itself (a long call that does not release its lock, SIGSTOP) keeps this thread as well.
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
        self._lock = threading.Lock()  # of the robot, while a hold is decided on and sent
        self._due = 0.0  # when the robot is to be held
        self._last: float | None = None  # when it had its last command or hold
        self._held = False  # since the last claim
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
            self._thread.join(1.0)  # a hold that never returns keeps nobody from ending

    def claim(self) -> bool:
        """Take the robot for a command or a hold; return True if it was held since the last claim."""
        with self._lock:
            held, self._held = self._held, False
            self._note()
            self._due = self._now() + self.limit
        return held

    def sent(self) -> None:
        """Note that what the robot was claimed for is done."""
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
        """Hold, with the robot claimed."""
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
    """Return the watchdog of a robot. wanted: what the settings say. real: the loop goes by the machine's clock. A
    robot whose ``concurrent_hold`` is False is not held from another thread."""
    return Watchdog(robot.hold, period, wanted and real and facts_of(robot).concurrent_hold)
