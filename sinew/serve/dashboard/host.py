"""Measures the load of the server's machine for the dashboard: its processors and its memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sinew.core import machine

STAT = Path("/proc/stat")


class Host:
    """Measures the load of this machine and of this process. Each call of ``look`` returns the load since the
    previous call, as shares. The first call returns no shares.
    """

    def __init__(self) -> None:
        # The number is read once, because reading it takes a millisecond.
        self._cores = machine.cores().logical
        # Time of the last call, and CPU time of this process at that time, in seconds.
        self._own: tuple[float, float] | None = None
        self._all: tuple[int, int] | None = None  # all CPU ticks and the busy CPU ticks at the last call

    def look(self) -> dict[str, Any]:
        """Return ``cores`` and ``memory`` of the machine. If known, also return ``cpu`` (the busy share of all cores)
        and ``own_cores`` (the CPU time of this process divided by the elapsed time).
        """
        limit, available = machine.memory()
        load: dict[str, Any] = {
            "cores": self._cores,
            "memory": {"limit": limit, "available": available},
        }
        own = time.perf_counter(), time.process_time()
        if self._own is not None and own[0] > self._own[0]:
            load["own_cores"] = round((own[1] - self._own[1]) / (own[0] - self._own[0]), 3)
        self._own = own
        if (ticks := _ticks()) is not None:
            if self._all is not None and ticks[0] > self._all[0]:
                load["cpu"] = round((ticks[1] - self._all[1]) / (ticks[0] - self._all[0]), 3)
            self._all = ticks
        return load


def _ticks() -> tuple[int, int] | None:
    """Return two numbers of clock ticks, summed over all processors since the machine was started (Linux): all ticks,
    and the ticks in which a processor was not idle.
    """
    try:
        text = STAT.read_text()  # own file: of the operating system
        # Columns in proc(5): user nice system idle iowait irq softirq steal.
        words = text.split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    numbers = [int(word) for word in words]
    return sum(numbers), sum(numbers) - numbers[3] - numbers[4]
