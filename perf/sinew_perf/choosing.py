"""Choose among modes of inference by their measured success, their cost and the cost of a failure.

A mode is a way to run a policy: on the robot, on a server, quantised, or with a larger policy as help. The expected
cost of an attempt is c + (1 - a p) F, with the cost c of the mode itself, its availability a, its success p and the
cost F of a failure. So no mode is best for every task: a cheap mode that fails more often is right where a failure
costs little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sinew.core import SinewError
from sinew.core.statistics import wilson
from sinew_client.untrusted import read_json, shown

from sinew_perf.success import SCHEMA, checked_number

DRAWS = 20_000  # number of random draws from the distribution of each mode's success rate
SURE = 0.95  # the chosen mode must be the cheapest in at least this share of the draws
MOST_EPISODES = 10**9


@dataclass(frozen=True)
class Mode:
    """A way to run a policy, and what was measured of it.

    Attributes:
        name: The user's name for the mode.
        wins: Number of successful episodes.
        episodes: Number of played episodes.
        cost: Cost of an attempt without its failure, such as energy or a server's rent, in the unit of all costs.
        available: Share of attempts in which the mode can be used, for example because the network works. The others
            count as failures.
        task: Environment of the episodes.
        latency: Latency with which the episodes were played, such as "100ms"; "" if the report has none.
    """

    name: str
    wins: int
    episodes: int
    cost: float = 0.0
    available: float = 1.0
    task: str = ""
    latency: str = ""

    @property
    def success(self) -> float:
        """Return the measured share of successes, including the attempts in which the mode is not available."""
        return self.available * self.wins / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of :attr:`success`."""
        low, high = wilson(self.wins, self.episodes)
        return self.available * low, self.available * high

    def expected(self, failure: float) -> float:
        """Return the expected cost of an attempt with this mode, if a failed attempt costs ``failure`` in addition."""
        return self.cost + (1.0 - self.success) * failure


@dataclass(frozen=True)
class ModeCost:
    """The expected cost of a mode.

    Attributes:
        mode: The mode.
        expected: Expected cost of an attempt.
        low: Lower end of the 95 % interval of this cost.
        high: Upper end of the 95 % interval of this cost.
        cheapest: Share of the random draws (of the modes' success rates) in which this mode has the least expected
            cost.
    """

    mode: Mode
    expected: float
    low: float
    high: float
    cheapest: float


@dataclass(frozen=True)
class Selection:
    """The result of a comparison of modes.

    Attributes:
        modes: All modes, the least expected cost first.
        failure: Cost of a failure.
        ranges: For each mode that is the best one for some cost of a failure: (the smallest such cost, name of the
            mode).
        episodes: Number of episodes of each mode that would probably decide between the first two modes. 0 if the
            present ones decide, None if they cost the same.
    """

    modes: list[ModeCost]
    failure: float
    ranges: list[tuple[float, str]]
    episodes: int | None

    @property
    def chosen(self) -> ModeCost:
        return self.modes[0]

    @property
    def sure(self) -> bool:
        """True if the played episodes are enough to decide between the modes."""
        return self.chosen.cheapest >= SURE


def read_mode(name: str, text: str, cost: float = 0.0, available: float = 1.0) -> Mode:
    """Read the success of a mode from a report.

    Args:
        name: Name of the mode.
        text: ``report.json`` of `sinew eval`, or ``report.json:LABEL`` for one variant of a sweep.
        cost: Cost of an attempt.
        available: Share of attempts in which the mode can be used.

    Raises:
        SinewError: The file is not such a report, or it does not have the variant.
    """
    place, label = Path(text), ""
    if not place.exists() and ".json:" in text:
        head, _, label = text.partition(".json:")
        place = Path(f"{head}.json")
    if place.is_dir():
        place /= "report.json"
    try:
        report = read_json(place)
        if report["schema"] != SCHEMA:
            raise ValueError(f"schema: expected {SCHEMA}, got {shown(report['schema'])}")
        variants = {str(entry["label"])[:200]: entry for entry in report["variants"]}
        if not label and len(variants) == 1:
            label = next(iter(variants))
        if label not in variants:
            wanted = f"no variant {shown(label)}" if label else "several variants"
            raise ValueError(
                f"{wanted}: write --mode {name}={place}:LABEL with one of {', '.join(map(shown, variants))}"
            )
        entry = variants[label]
        wins, episodes = (
            int(checked_number(entry[key], key, 0, MOST_EPISODES)) for key in ("wins", "episodes")
        )
        if not 0 <= wins <= episodes or not episodes:
            raise ValueError(f"wins: expected 0 to {episodes} of at least one episode, got {wins}")
        latency = str((entry.get("variant") or {}).get("latency") or "")[:200]
        task = str(report["task"]["env"])[:200]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise SinewError(f"--mode {name}: expected report.json of sinew eval, got {kind}{error}") from None
    return Mode(name, wins, episodes, cost, available, task, latency)


def select(modes: Sequence[Mode], failure: float, seed: int = 0) -> Selection:
    """Choose the mode with the least expected cost.

    The success of each mode is drawn from Jeffreys' distribution Beta(wins + 1/2, failures + 1/2), independently. If
    the modes played the same seeds, this understates how sure the choice is.

    Args:
        modes: The modes, at least two.
        failure: Cost of a failure, in the unit of the modes' costs.
        seed: Seed of the draws.

    Raises:
        SinewError: The modes have been measured on different tasks, or there are too few.
    """
    if len(modes) < 2:
        raise SinewError(f"--mode: expected at least two modes to choose from, got {len(modes)}")
    tasks = sorted({mode.task for mode in modes})
    if len(tasks) > 1:
        raise SinewError(f"--mode: expected reports of one task, got {', '.join(map(shown, tasks))}")
    rng = np.random.default_rng(seed)
    success = np.array(
        [mode.available * rng.beta(mode.wins + 0.5, mode.episodes - mode.wins + 0.5, DRAWS) for mode in modes]
    )
    costs = np.array([mode.cost for mode in modes])[:, None] + (1.0 - success) * failure
    best = np.bincount(costs.argmin(0), minlength=len(modes)) / DRAWS
    rows = []
    for mode, own, share in zip(modes, costs, best, strict=True):
        low, high = np.percentile(own, (2.5, 97.5))
        rows.append(ModeCost(mode, mode.expected(failure), float(low), float(high), float(share)))
    rows.sort(key=lambda row: (row.expected, row.mode.cost))
    more = 0 if rows[0].cheapest >= SURE else _episodes(rows[0].mode, rows[1].mode, failure)
    return Selection(rows, failure, ranges(modes), more)


def ranges(modes: Sequence[Mode]) -> list[tuple[float, str]]:
    """For each mode that can be the best one, return the smallest cost of a failure for which it is the best one, by
    the measured success.

    The expected costs are straight lines over the cost of a failure. The result is their lower envelope.
    """
    at = 0.0
    now = min(modes, key=lambda mode: (mode.cost, -mode.success))
    result = [(at, now.name)]
    while True:
        crossings = [
            ((mode.cost - now.cost) / (mode.success - now.success), -mode.success, mode)
            for mode in modes
            if mode.success > now.success
        ]
        if not crossings:
            return result
        at, _, now = min(crossings, key=lambda each: each[:2])
        result.append((at, now.name))


def _episodes(first: Mode, second: Mode, failure: float) -> int | None:
    """Return how many episodes of each mode decide between two modes, if their measured success is right.

    The difference of both expected costs must be 1.96 of its standard errors.
    """
    gap = abs(first.expected(failure) - second.expected(failure))
    if not gap:
        return None
    variance = 0.0
    for mode in (first, second):
        # With half a success and half a failure added, a mode without failures still has a variance.
        share = (mode.wins + 0.5) / (mode.episodes + 1.0)
        variance += (mode.available * failure) ** 2 * share * (1.0 - share)
    return math.ceil(1.96**2 * variance / gap**2)
