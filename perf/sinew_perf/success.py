"""Convert a latency to a success rate by measured curves, and find the machines that reach a required success.

`sinew eval POLICY --sweep latency=... --sweep handover=... --sweep replan=...` plays a task at many latencies. Its
report has one curve of success for each way of driving, which is a chunk merging and a replan rule. Between two
measured latencies, success and its interval are interpolated linearly. Beyond the last one, they are unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from sinew.core import SinewError
from sinew.core.statistics import wilson
from sinew_client.untrusted import read_json, shown

SCHEMA = "sinew.eval/1"
POINTS = 99  # number of percentiles that represent a distribution of latencies
MOST_VARIANTS = 10_000
_CONSTANT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms)?")


@dataclass(frozen=True)
class Rate:
    """A share of successes with its 95 % interval, each from 0 to 1."""

    success: float
    low: float
    high: float

    def text(self) -> str:
        """Return the share in percent, with its interval."""
        return f"{100 * self.success:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"


@dataclass(frozen=True)
class LatencySpread:
    """The latency of a request: a normal distribution that is never below 0.

    Attributes:
        mean_ms: Mean in milliseconds.
        deviation_ms: Standard deviation in milliseconds. 0 if all requests have the same latency.
    """

    mean_ms: float
    deviation_ms: float = 0.0

    def points(self) -> list[float]:
        """Return several latencies of equal probability, in milliseconds. Together, they represent the distribution."""
        if not self.deviation_ms:
            return [self.mean_ms]
        normal = NormalDist(self.mean_ms, self.deviation_ms)
        return [max(0.0, normal.inv_cdf((k + 0.5) / POINTS)) for k in range(POINTS)]


@dataclass(frozen=True)
class Way:
    """A way of driving, and its measured success.

    Attributes:
        handover: Chunk merging.
        replan: Rule for the next request.
        control_hz: Control steps per second. An answer takes effect at the next control step.
        measured: For each latency in control steps, in rising order: (number of successes, number of episodes).
    """

    handover: str
    replan: str
    control_hz: float
    measured: dict[int, tuple[int, int]]

    @property
    def name(self) -> str:
        """Return the way of driving as a text: its chunk merging and its replan rule."""
        return f"{self.handover}, replan {self.replan}"

    @property
    def longest_ms(self) -> float:
        """Return the largest measured latency, in milliseconds."""
        return 1e3 * max(self.measured) / self.control_hz

    def at(self, latency_ms: float) -> Rate | None:
        """Return the success rate at a constant latency. None if this latency is above the largest measured latency."""
        steps = math.ceil(latency_ms * self.control_hz / 1e3 - 1e-6)
        played = sorted(self.measured)
        if steps > played[-1]:
            return None
        after = next(each for each in played if each >= steps)
        before = max((each for each in played if each <= steps), default=after)
        part = 0.0 if after == before else (steps - before) / (after - before)
        first, second = (_rate(*self.measured[each]) for each in (before, after))
        return Rate(*(a + part * (b - a) for a, b in zip(_parts(first), _parts(second), strict=True)))

    def of(self, latency: LatencySpread) -> Rate | None:
        """Return the success if the latency is drawn from a distribution.

        Args:
            latency: The distribution.

        Returns:
            The mean over its percentiles. A percentile beyond the largest measured latency counts as a failure. None
            if the mean latency itself is beyond it.
        """
        if self.at(latency.mean_ms) is None:
            return None
        rates = [self.at(each) or Rate(0.0, 0.0, 0.0) for each in latency.points()]
        return Rate(*(sum(column) / len(rates) for column in zip(*map(_parts, rates), strict=True)))

    def budget_ms(self, success: float, deviation_ms: float = 0.0) -> float:
        """Return the largest mean latency with at least this success, in whole milliseconds; -1 if there is none.

        Args:
            success: Required success, 0 to 1.
            deviation_ms: Standard deviation of the latency.
        """
        best = -1.0
        for ms in range(int(self.longest_ms) + 1):
            rate = self.of(LatencySpread(float(ms), deviation_ms))
            if rate is None or rate.success < success:
                break
            best = float(ms)
        return best


def read_surface(path: Path) -> tuple[str, list[Way]]:
    """Read the task and its ways of driving from a report.

    Args:
        path: ``report.json`` of `sinew eval --sweep latency=...`.

    Returns:
        The name of the task, and the ways in the order of the report.

    Raises:
        SinewError: The file is not such a report, or every way has fewer than two latencies.
    """
    try:
        report = read_json(path)
        if report["schema"] != SCHEMA:
            raise ValueError(f"schema: expected {SCHEMA}, got {shown(report['schema'])}")
        hz = checked_number(report["control_hz"], "control_hz", 1e-3, 1e5)
        curves: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        if len(report["variants"]) > MOST_VARIANTS:
            raise ValueError(f"variants: expected at most {MOST_VARIANTS}, got {len(report['variants'])}")
        for entry in report["variants"]:
            variant = entry["variant"]
            constant = _CONSTANT.fullmatch(str(variant["latency"]))
            # Skip a latency that is a distribution, because it is not a single point of the curve.
            if constant is None:
                continue
            latency = float(constant[1])
            steps = math.ceil(latency * hz / 1e3 - 1e-9) if constant[2] else int(latency)
            wins, episodes = (int(checked_number(entry[name], name, 0, 1e9)) for name in ("wins", "episodes"))
            if not wins <= episodes or not episodes:
                raise ValueError(f"wins: expected 0 to {episodes} of at least one episode, got {wins}")
            key = str(variant["handover"])[:200], str(variant["replan"])[:200]
            before = curves.setdefault(key, {}).get(steps, (0, 0))
            curves[key][steps] = before[0] + wins, before[1] + episodes
        task = str(report["task"]["env"])[:200]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise SinewError(f"--report {path}: expected report.json of sinew eval, got {kind}{error}") from None
    ways = [
        Way(*key, hz, dict(sorted(measured.items()))) for key, measured in curves.items() if len(measured) > 1
    ]
    if not ways:
        raise SinewError(
            f"--report {path}: expected at least two latencies of a chunk merging, got one; play"
            " `sinew eval POLICY --sweep latency=0ms,50ms,100ms,200ms`"
        )
    return task, ways


def best(ways: Iterable[Way], latency: LatencySpread) -> tuple[Way, Rate] | None:
    """Return the way of driving with the largest success at a latency, and its success. None if no way was measured at
    such a large latency.
    """
    rates = [(way, rate) for way in ways if (rate := way.of(latency)) is not None]
    return max(rates, key=lambda each: each[1].success, default=None)


def reasons(ways: Sequence[Way], success: float, deviation_ms: float) -> list[str]:
    """For each way of driving, return one sentence that states up to which latency it has the required success. The way
    with the largest latency comes first.
    """
    budgets = sorted(((way.budget_ms(success, deviation_ms), way) for way in ways), key=lambda each: -each[0])
    lines = []
    for most, way in budgets:
        first = _rate(*way.measured[min(way.measured)])
        if most < 0:
            lines.append(f"{way.name}: {first.text()} at the shortest latency, which is too low")
        elif most >= int(way.longest_ms):
            lines.append(f"{way.name}: enough up to {most:.0f} ms, the largest latency that was played")
        else:
            beyond = way.of(LatencySpread(most + 1, deviation_ms))
            assert beyond is not None
            lines.append(f"{way.name}: enough up to {most:.0f} ms; {beyond.text()} beyond it")
    return lines


def _rate(wins: int, episodes: int) -> Rate:
    return Rate(wins / episodes, *wilson(wins, episodes))


def _parts(rate: Rate) -> tuple[float, float, float]:
    return rate.success, rate.low, rate.high


def checked_number(value: Any, name: str, least: float, most: float) -> float:
    """Check a number of a report, and return it as a float.

    Args:
        value: The value in the report.
        name: Name of the field, for the error message.
        least: Smallest allowed number.
        most: Largest allowed number.

    Raises:
        ValueError: The value is not a number in this range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name}: expected {least:g} to {most:g}, got {shown(value)}")
    return float(value)
