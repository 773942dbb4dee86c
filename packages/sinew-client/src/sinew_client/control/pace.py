"""Absolute deadlines: tick k is due at start + k periods, whatever the ticks before it took."""

from __future__ import annotations

import time
from collections import deque
from typing import Callable

KEPT = 100_000  # latenesses of ticks that are remembered


class Pace:
    """Waits for the ticks of a fixed rate. No drift: a late tick does not move the ones after it.

    late: ticks that began more than half a period after they were due. skipped: ticks that were not begun at all,
    because a whole period had passed; their number is left out, so the number of a tick tells the time.
    now, sleep: a clock in seconds that never jumps, and what waits on it.
    """

    def __init__(
        self,
        period: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.period, self.now, self._sleep = period, now, sleep
        self.late = self.skipped = self.ticks = 0
        self.lateness: deque[float] = deque(maxlen=KEPT)  # seconds after a tick was due
        self._start: float | None = None
        self._number = -1

    def next(self) -> int:
        """Wait for the next tick and return its number, which counts periods since the first one."""
        if self._start is None:
            self._start = self.now()
        self._number += 1
        wait = self.due(self._number) - self.now()
        while wait > 0:  # a sleep may end early
            self._sleep(wait)
            wait = self.due(self._number) - self.now()
        behind = -wait
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
        """Return when a tick is due, in seconds of the clock."""
        assert self._start is not None, "no tick has begun"
        return self._start + number * self.period
