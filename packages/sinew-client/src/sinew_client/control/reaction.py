"""Measure reaction times: from an event in front of the camera to the first command that depends on it."""

from __future__ import annotations

from collections import deque
from typing import Any, Iterable, Sequence

import numpy as np

from sinew_client.control.report import percentiles

KEPT = 200_000  # number of executed actions that are stored
LOOPS = ("sensor", "image")


class Reactions:
    """Stores when each action was executed, and when its newest state and its newest frame were measured.

    All times are seconds of one clock. The loop "sensor" uses the times of states, the loop "image" those of frames.
    """

    def __init__(self) -> None:
        self._rows: deque = deque(maxlen=KEPT)

    def add(self, time: float, sample_time: float, frame_time: float) -> None:
        """Record an executed action.

        Args:
            time: Time of the execution.
            sample_time: Time of the newest state from which the action was computed.
            frame_time: Time of the newest frame from which the action was computed.
        """
        self._rows.append((time, sample_time, frame_time))

    def ages(self, loop: str) -> list[float]:
        """Return the age of the state ("sensor") or of the frame ("image") of each executed action, in seconds."""
        column = 1 + LOOPS.index(loop)
        return [row[0] - row[column] for row in self._rows]

    def of(self, loop: str, stimuli: Sequence[float]) -> list[float]:
        """Compute the reaction time to each event.

        Args:
            loop: "sensor" or "image".
            stimuli: Times of the events.

        Returns:
            For each event, the seconds until the first action whose state or frame was measured at or after the event.
            Events without such an action are skipped.
        """
        if not self._rows:
            return []
        table = np.array(self._rows, np.float64)  # [N, 3]
        newest = np.maximum.accumulate(table[:, 1 + LOOPS.index(loop)])
        at = np.searchsorted(newest, np.asarray(stimuli, np.float64), side="left")
        return [float(table[k, 0] - s) for k, s in zip(at, stimuli) if k < len(table)]

    def anywhere(self, loop: str, count: int = 2000, seed: int = 0) -> list[float]:
        """Return the reaction times in seconds to ``count`` events at random times during the run.

        Args:
            loop: "sensor" or "image".
            count: Number of events.
            seed: Seed of the random times.
        """
        if len(self._rows) < 2:
            return []
        rng = np.random.default_rng(seed)
        return self.of(loop, np.sort(rng.uniform(self._rows[0][0], self._rows[-1][0], count)))

    def summary(self) -> dict[str, Any]:
        """Return p50, p95, p99 and max of the reaction times and of the ages, in milliseconds, for both loops ("sensor"
        and "image").
        """
        times = {}
        for loop in LOOPS:
            times[f"{loop}_reaction_ms"] = percentiles(1e3 * value for value in self.anywhere(loop))
            times[f"{loop}_age_ms"] = percentiles(1e3 * value for value in self.ages(loop))
        return times


def histogram(values: Iterable[float], width: float = 0.0, bins: int = 40) -> dict[str, int]:
    """Count values in bins of equal width.

    Args:
        values: The values.
        width: Width of a bin. 0 takes the smallest of 1, 2, 5, 10 ... with at most ``bins`` bins between 0 and the
            largest value.
        bins: Largest number of bins, if ``width`` is 0.

    Returns:
        The count of each bin. The keys are the lower ends of the bins as texts, in rising order, ready for JSON.

    Example:
        >>> histogram([1.0, 1.5, 3.0], width=1.0)
        {'1': 2, '3': 1}
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
