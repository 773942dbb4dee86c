"""Measure the time from a stimulus to the first command whose frame contains it."""

from __future__ import annotations

from collections import deque
from typing import Any, Iterable, Sequence

import numpy as np

from sinew_client.control.report import percentiles

KEPT = 200_000  # number of executed actions that are stored
LOOPS = ("sensor", "image")


class Reactions:
    """Executed actions, with the times of their newest sample and newest frame. All times are seconds of one clock."""

    def __init__(self) -> None:
        self._rows: deque = deque(maxlen=KEPT)

    def add(self, time: float, sample_time: float, frame_time: float) -> None:
        """Record an action that was executed at ``time``."""
        self._rows.append((time, sample_time, frame_time))

    def ages(self, loop: str) -> list[float]:
        """Return the age of the newest sample ("sensor") or frame ("image") of each executed action, in seconds."""
        column = 1 + LOOPS.index(loop)
        return [row[0] - row[column] for row in self._rows]

    def of(self, loop: str, stimuli: Sequence[float]) -> list[float]:
        """Return the seconds from each stimulus to the first action whose sample or frame was taken at or after it.

        A stimulus without such an action is left out.
        """
        if not self._rows:
            return []
        table = np.array(self._rows, np.float64)  # [N, 3]
        newest = np.maximum.accumulate(table[:, 1 + LOOPS.index(loop)])
        at = np.searchsorted(newest, np.asarray(stimuli, np.float64), side="left")
        return [float(table[k, 0] - s) for k, s in zip(at, stimuli) if k < len(table)]

    def anywhere(self, loop: str, count: int = 2000, seed: int = 0) -> list[float]:
        """Return the reactions to ``count`` stimuli at random times between the first and the last action."""
        if len(self._rows) < 2:
            return []
        rng = np.random.default_rng(seed)
        return self.of(loop, np.sort(rng.uniform(self._rows[0][0], self._rows[-1][0], count)))

    def summary(self) -> dict[str, Any]:
        """Return p50, p95, p99 and max of both loops' reactions and ages, in milliseconds."""
        times = {}
        for loop in LOOPS:
            times[f"{loop}_reaction_ms"] = percentiles(1e3 * value for value in self.anywhere(loop))
            times[f"{loop}_age_ms"] = percentiles(1e3 * value for value in self.ages(loop))
        return times


def histogram(values: Iterable[float], width: float = 0.0, bins: int = 40) -> dict[str, int]:
    """Count values in bins. The keys are the lower ends of the bins, in order, as texts for JSON.

    Args:
        values: The values.
        width: Width of a bin. 0 takes the smallest of 1, 2, 5, 10 ... with at most ``bins`` bins between 0 and the
            largest value.
        bins: Largest number of bins, if ``width`` is 0.
    """
    numbers = np.fromiter(values, np.float64)
    if not numbers.size:
        return {}
    if not width:
        least = max(float(numbers.max()), 1e-9) / bins
        scale = 10.0 ** np.floor(np.log10(least))
        width = next(float(step * scale) for step in (1, 2, 5, 10) if step * scale >= least)
    lows, counts = np.unique(np.floor(numbers / width + 1e-9).astype(int), return_counts=True)
    return {f"{low * width:g}": int(count) for low, count in zip(lows, counts)}
