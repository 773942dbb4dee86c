"""Wait for the ticks of a fixed rate. Tick k is due exactly k periods after the first tick."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Callable

logger = logging.getLogger(__name__)

KEPT = 100_000  # the lateness is stored for at most this many ticks (starts of a control step)


class Pace:
    """Waits for the ticks of a fixed rate, without drift: a late tick does not delay the later ticks.

    If the clock is set back, for example after a virtual machine was restored, the ticks move with the clock. The next
    tick is then due after at most one period.

    Args:
        period: Seconds between two ticks.
        now: The clock: a function that returns seconds.
        sleep: Function that waits for some seconds of this clock.

    Attributes:
        late: Number of ticks that began more than half a period late.
        skipped: Number of ticks that were skipped because they were late by a whole period. Their numbers are skipped
            too, so the number of a tick always corresponds to its time.
        ticks: Number of ticks so far.
        lateness: How late each of the newest ticks began, in seconds.
        set_back: Number of times that the clock was set back.
    """

    def __init__(
        self,
        period: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.period, self.now, self.sleep = period, now, sleep
        self.late = self.skipped = self.ticks = self.set_back = 0
        self.lateness: deque[float] = deque(maxlen=KEPT)  # how late each tick began, seconds
        self._start: float | None = None
        self._number = -1
        self._seen = float("-inf")  # the last time that was read from the clock, seconds

    @property
    def real(self) -> bool:
        """True if the clock is the machine's own clock."""
        return self.now is time.monotonic

    def next(self) -> int:
        """Wait for the next tick. Return its number, which counts the periods since the first tick."""
        if self._start is None:
            self._start = self.now()
        self._number += 1
        wait = self._wait()
        # Repeat the sleep, because a sleep may end early.
        while wait > 0:
            self.sleep(min(wait, self.period))
            wait = self._wait()
        # Subtract from 0.0 instead of writing -wait, because -wait would be -0.0 for a tick that is exactly on time.
        behind = 0.0 - wait
        if behind >= self.period:
            missed = int(behind / self.period)
            self.skipped += missed
            self._number += missed
            behind -= missed * self.period
        self.late += behind > self.period / 2
        self.lateness.append(behind)
        self.ticks += 1
        return self._number

    def due(self, number: int) -> float:
        """Return the time at which a tick is due, in seconds of the clock."""
        assert self._start is not None, "no tick has begun"
        return self._start + number * self.period

    def since(self, moment: float) -> float:
        """Return the seconds from the first tick to ``moment`` (seconds of the clock); 0 before the first tick."""
        return 0.0 if self._start is None else moment - self._start

    def _wait(self) -> float:
        """Return the seconds until the next tick is due; negative if it is late."""
        now = self.now()
        if now < self._seen:
            assert self._start is not None
            logger.warning("the clock was set back by %.3f s; the control loop continues", self._seen - now)
            self._start -= self._seen - now
            self.set_back += 1
        self._seen = now
        return self.due(self._number) - now


class SimulatedPace(Pace):
    """Simulated time: each tick advances the time by exactly one period, and no tick waits.

    A run with this pace does not depend on the machine's clock, so it always has the same result.

    Args:
        hz: Ticks per second.
    """

    def __init__(self, hz: float):
        super().__init__(1.0 / hz, now=lambda: max(0, self._number) / hz)
        self._hz = hz

    def next(self) -> int:
        """Begin the next tick and return its number."""
        self._number += 1
        self.ticks += 1
        return self._number

    def due(self, number: int) -> float:
        return number / self._hz

    def since(self, moment: float) -> float:
        return moment
