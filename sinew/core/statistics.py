"""Percentiles, ratios of medians and intervals of proportions. Uses only the standard library and numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sinew_client import ActionChunk, Timing

Z95 = 1.959963984540054  # 0.975 quantile of the standard normal distribution


def wilson(wins: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Return the confidence interval of a success rate (score interval, Wilson 1927); (0, 1) if ``count`` is 0.

    Unlike the normal approximation, the interval is also valid for 0 and for ``count`` wins.

    Args:
        wins: Number of successes.
        count: Number of trials.
        z: Quantile of the standard normal distribution; the default gives 95 %.
    """
    if not 0 <= wins <= count:
        raise ValueError(f"wins: expected 0 to {count}, got {wins}")
    if count == 0:
        return 0.0, 1.0
    p, z2 = wins / count, z * z
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = z / (1 + z2 / count) * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count))
    # The exact bound is 0 if there are no successes, so avoid a rounding error.
    low = 0.0 if wins == 0 else max(0.0, middle - half)
    high = 1.0 if wins == count else min(1.0, middle + half)
    return low, high


def summarize(samples: Any, percentiles: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """Return mean, percentiles (p50, p95 ...) and max of some numbers; {} if there are no numbers.

    A percentile is always one of the observed values: its rank is rounded up. So p99 of fewer than 100 samples is their
    maximum.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not values.size:
        return {}
    ranks = np.percentile(values, percentiles, method="higher")
    named = {f"p{rank}": value for rank, value in zip(percentiles, ranks, strict=True)}
    summary = {"mean": values.mean(), **named, "max": values.max()}
    return {name: round(float(value), 4) for name, value in summary.items()}


def ratio_of_medians(before: Sequence[float], now: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two medians and its 95 % interval.

    The interval comes from 2,000 bootstrap samples of both series (Efron 1979), drawn with a fixed seed.

    Args:
        before: The first series. Its median is the denominator.
        now: The second series.

    Returns:
        The ratio, and the lower and the upper end of the interval.
    """
    draw = np.random.default_rng(0)
    medians = [
        np.median(draw.choice(np.asarray(samples, np.float64), (2000, len(samples))), axis=1)
        for samples in (now, before)
    ]
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    return float(np.median(now) / np.median(before)), float(low), float(high)


def p99_of(count: int) -> str:
    """Return a note for a table's title: with fewer than 100 samples, p99 is only the largest value; else ""."""
    return "" if count >= 100 else "; their p99 is the largest"


def stage_statistics(
    timings: Sequence[Timing], totals: Sequence[float], apart: Sequence[Timing] = ()
) -> dict[str, Any]:
    """Return statistics of each stage of an inference (such as vision, prefix and solver), in the order in
    which the stages run.

    Args:
        timings: Times of the runs.
        totals: Total times of the runs, in milliseconds.
        apart: Times of further runs in which the stages were timed one by one. The result then contains
            ``graph``, the time of all these stages together.

    Returns:
        Stage -> statistics in milliseconds. ``steps`` has one entry for each solver step.
    """
    stages: dict[str, Any] = {"preprocess": summarize([t.preprocess_ms for t in timings])}
    if apart:
        stages["graph"] = summarize([t.head_ms for t in timings])
    parts = apart or timings
    stages["vision"] = summarize([t.vision_ms for t in parts])
    stages["prefix"] = summarize([t.prefix_ms for t in parts])
    steps = np.array([t.step_ms for t in parts])  # [runs, steps]
    if steps.size:
        stages["steps"] = [summarize(column) for column in steps.T]
        stages["head"] = summarize(steps.sum(axis=1))
    stages["postprocess"] = summarize([t.postprocess_ms for t in timings])
    stages["total"] = summarize(totals)
    return stages


def latencies(chunks: Sequence[ActionChunk]) -> dict[str, dict[str, float]]:
    """Return statistics of the response times that a client measured: stage -> percentiles in milliseconds.

    ``overhead`` is the round trip minus the server's total: client, transport, buffers. ``outside the policy``
    also includes the server's own work: decoding, passing data between threads, encoding.
    """
    stages = ("queue", "preprocess", "vision", "prefix", "head", "postprocess")
    rows = {
        "round trip": [chunk.round_trip_ms for chunk in chunks],
        "server total": [chunk.timing.server_ms for chunk in chunks],
        **{stage: [getattr(chunk.timing, f"{stage}_ms") for chunk in chunks] for stage in stages},
        "policy total": [chunk.timing.total_ms for chunk in chunks],
        "overhead": [chunk.round_trip_ms - chunk.timing.server_ms for chunk in chunks],
        "outside the policy": [chunk.round_trip_ms - chunk.timing.total_ms for chunk in chunks],
    }
    return {name: summarize(samples, (50, 90, 95, 99)) for name, samples in rows.items()}
