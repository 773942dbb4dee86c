"""Measure the time of the first answer after a pause. This answer is slower, because clock rates have dropped, caches
contain other data, and memory may be swapped out.

A measurement at a steady rate hides this effect, because each inference begins right after the previous inference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from sinew.core import SinewError

ROUNDS = 3  # number of pauses of each length
MAX_PAUSE_S = 3600.0


def parse_pauses(text: str | None) -> tuple[float, ...]:
    """Read the lengths of pauses: seconds in rising order, separated by commas.

    Raises:
        SinewError: The text is invalid.
    """
    if text is None:
        return ()
    try:
        seconds = tuple(float(part) for part in text.split(","))
    except ValueError:
        seconds = ()
    rising = all(first < second for first, second in pairwise(seconds))
    if not seconds or not rising or not all(0 <= each <= MAX_PAUSE_S for each in seconds):
        expected = f"seconds from 0 to {MAX_PAUSE_S:g} in rising order, for example 0,1,10"
        raise SinewError(f"--idle: expected {expected}, got {text!r}")
    return seconds


def after_pauses(
    infer: Callable[[], Any], pauses: Sequence[float], steady_ms: float
) -> Iterator[dict[str, Any]]:
    """Pause, then time the first answer, ``ROUNDS`` times for each length of pause. Yield the results.

    Args:
        infer: Computes one answer.
        pauses: Seconds without a request.
        steady_ms: Median of the steady state, for the ratio.

    Yields:
        A row for each pause, ready for JSON: ``pause_s``, ``samples_ms``, ``p50_ms``, ``max_ms`` and ``of_steady``,
        which is the median over ``steady_ms``.
    """
    for pause in pauses:
        samples = []
        for _ in range(ROUNDS):
            infer()  # a pause begins after an answer
            time.sleep(pause)
            begin = time.perf_counter()
            infer()
            samples.append(1e3 * (time.perf_counter() - begin))
        median = statistics.median(samples)
        yield {
            "pause_s": pause,
            "samples_ms": [round(each, 3) for each in samples],
            "p50_ms": median,
            "max_ms": max(samples),
            "of_steady": median / steady_ms,
        }


def pause_rows(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a table: pause, median, largest time, and the ratio of the median to the steady state's
    median."""
    for row in rows:
        yield (
            f"{row['pause_s']:g} s",
            f"{row['p50_ms']:.1f}",
            f"{row['max_ms']:.1f}",
            f"{row['of_steady']:.2f}",
        )


COLUMNS = ("after", ">p50", ">max", ">of the steady p50")
TITLE = f"milliseconds of the first answer after a pause, {ROUNDS} of each"
