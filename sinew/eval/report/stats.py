"""Statistics of success: intervals, paired tests, rates. Standard library and numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sinew_client import ActionChunk, Timing

Z95 = 1.959963984540054  # standard normal quantile at 0.975


def wilson(wins: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927), within [0, 1]; (0, 1) when nothing was counted.

    Unlike the normal approximation it stays honest at 0 and at ``count`` wins.
    """
    if not 0 <= wins <= count:
        raise ValueError(f"wins: expected 0 to {count}, got {wins}")
    if count == 0:
        return 0.0, 1.0
    p, z2 = wins / count, z * z
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = z / (1 + z2 / count) * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count))
    low = 0.0 if wins == 0 else max(0.0, middle - half)  # exact at the ends, where rounding would show
    high = 1.0 if wins == count else min(1.0, middle + half)
    return low, high


@dataclass(frozen=True, slots=True)
class McNemar:
    """Paired comparison of two variants over the same seeds."""

    pairs: int
    only_first: int  # seeds where only the first variant succeeded
    only_second: int
    p_value: float


def mcnemar(first: Mapping[int, bool], second: Mapping[int, bool]) -> McNemar:
    """Exact two-sided test over the seeds that both have (McNemar 1947, binomial form).

    Under equal success each discordant pair falls on either side with probability one half; pairs that agree
    say nothing. p = min(1, 2 P[Binomial(n, 1/2) <= min(b, c)]).
    """
    seeds = first.keys() & second.keys()
    only_first = sum(first[seed] and not second[seed] for seed in seeds)
    only_second = sum(second[seed] and not first[seed] for seed in seeds)
    return McNemar(len(seeds), only_first, only_second, binomial_p(only_first, only_second))


def binomial_p(b: int, c: int) -> float:
    """Two-sided exact p-value of b against c successes of a fair coin."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2**n)


FEW = 50  # pairs, of which the normal approximation may take too few: six have to disagree at least
Z80 = 0.8416212335729143  # standard normal quantile at 0.8


def pairs_needed(pairs: int, only_first: int, only_second: int) -> int | None:
    """Return how many pairs McNemar's test at 5 % takes to show a difference as large as the one that was seen, about
    four times of five; None where none was seen.

    Connor 1987 (Biometrics 43, 207 to 211): n = (z_a sqrt(p) + z_b sqrt(p - d^2))^2 / d^2 of the difference d and the
    share p of pairs that disagree; more where these are few and the test, being exact, needs them.
    """
    if only_first == only_second:
        return None
    share, difference = (only_first + only_second) / pairs, abs(only_first - only_second) / pairs
    spread = Z95 * math.sqrt(share) + Z80 * math.sqrt(share - difference**2)
    needed = math.ceil((spread / difference) ** 2)
    while needed <= FEW and mcnemar_power(needed, only_first / pairs, only_second / pairs) < 0.75:
        needed += 1
    return needed


def mcnemar_power(pairs: int, only_first: float, only_second: float) -> float:
    """Return how often McNemar's exact test at 5 % shows a difference, by the shares of pairs that disagree."""
    agree, power = max(0.0, 1 - only_first - only_second), 0.0
    for b in range(pairs + 1):
        for c in range(pairs - b + 1):
            if binomial_p(b, c) <= 0.05:
                ways = math.comb(pairs, b) * math.comb(pairs - b, c)
                power += ways * only_first**b * only_second**c * agree ** (pairs - b - c)
    return power


def anytime_p(disputed: Sequence[bool]) -> float:
    """Return a p-value of equal success that holds whenever one stops, also because of what was seen.

    disputed: of the pairs that disagree, in the order in which they were complete, whether the first won. Under equal
    success they are a fair coin, and E = 2^n B(b + 1, c + 1), a uniform mixture over all other coins, is a martingale
    that begins at 1: the chance that it ever reaches 1 / a is at most a (Ville 1939; Robbins 1970, Annals of
    Mathematical Statistics 41, 1397 to 1409). So p = 1 / max E.
    """
    won, smallest = 0, 1.0
    for count, first in enumerate(disputed, 1):
        won += first
        smallest = min(smallest, (count + 1) * math.comb(count, won) / 2**count)
    return smallest


def paired_difference(first: Mapping[int, bool], second: Mapping[int, bool]) -> tuple[float, float, float]:
    """Return the success of ``first`` less that of ``second`` over the seeds that both have, and its 95 % interval.

    Method 10 of Newcombe 1998 (Statistics in Medicine 17, 2635 to 2650): the score intervals of both, combined with
    their correlation.
    """
    seeds = first.keys() & second.keys()
    if not seeds:
        return 0.0, -1.0, 1.0
    n, a = len(seeds), sum(first[seed] and second[seed] for seed in seeds)
    wins = [sum(each[seed] for seed in seeds) for each in (first, second)]
    (low1, high1), (low2, high2) = (
        (win / n - low, high - win / n) for win in wins for low, high in [wilson(win, n)]
    )
    spread = float(a * (n - sum(wins) + a) - (wins[0] - a) * (wins[1] - a))
    if spread > 0:
        spread = max(spread - n / 2, 0.0)  # the correction for continuity
    scale = math.sqrt(math.prod(win * (n - win) for win in wins))
    phi = spread / scale if scale else 0.0
    difference = (wins[0] - wins[1]) / n
    below = math.sqrt(max(0.0, low1**2 - 2 * phi * low1 * high2 + high2**2))
    above = math.sqrt(max(0.0, high1**2 - 2 * phi * high1 * low2 + low2**2))
    return difference, difference - below, difference + above


def amortized_rate(steps: float, latency_ms: float) -> float:
    """Control rate in Hz when each inference of ``latency_ms`` is followed by ``steps`` executed actions.

    An upper bound set by inference alone: what one could drive if nothing else took time.
    """
    return 1e3 * steps / latency_ms if latency_ms > 0 else math.inf


def summarize(samples: Any, percentiles: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """Return mean, the percentiles as p50, p95 ..., and max of some numbers; nothing for none.

    Percentiles are observed values, rounded up in rank, so that p99 of few samples is their maximum.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not values.size:
        return {}
    ranks = np.percentile(values, percentiles, method="higher")
    named = {f"p{rank}": value for rank, value in zip(percentiles, ranks, strict=True)}
    found = {"mean": values.mean(), **named, "max": values.max()}
    return {name: round(float(value), 4) for name, value in found.items()}


def ratio_of_medians(before: Sequence[float], now: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of ``now`` over that of ``before``, and its 95 % interval: percentiles of 2,000 bootstrap
    samples of both (Efron 1979), drawn from a fixed seed."""
    draw = np.random.default_rng(0)
    medians = [
        np.median(draw.choice(np.asarray(samples, np.float64), (2000, len(samples))), axis=1)
        for samples in (now, before)
    ]
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    return float(np.median(now) / np.median(before)), float(low), float(high)


def p99_of(count: int) -> str:
    """Return what a table's title has to say of the p99 of so many samples: of fewer than 100 it is the largest."""
    return "" if count >= 100 else "; their p99 is the largest"


def stage_statistics(
    timings: Sequence[Timing], totals: Sequence[float], apart: Sequence[Timing] = ()
) -> dict[str, Any]:
    """Return statistics per stage, in the order in which the stages run; ``steps`` has one entry per solver step.

    apart: of runs in which the stages were timed one by one; ``graph`` then is what they take as one.
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
    """Return statistics of answers as a client sees them, milliseconds by what takes them.

    ``overhead`` is the round trip without ``server total``: client, transport, and what the sockets hold.
    ``beside the policy`` also counts what the server adds: decoding, the hand-over between threads, encoding.
    """
    stages = ("queue", "preprocess", "vision", "prefix", "head", "postprocess")
    rows = {
        "round trip": [chunk.round_trip_ms for chunk in chunks],
        "server total": [chunk.timing.server_ms for chunk in chunks],
        **{stage: [getattr(chunk.timing, f"{stage}_ms") for chunk in chunks] for stage in stages},
        "policy total": [chunk.timing.total_ms for chunk in chunks],
        "overhead": [chunk.round_trip_ms - chunk.timing.server_ms for chunk in chunks],
        "beside the policy": [chunk.round_trip_ms - chunk.timing.total_ms for chunk in chunks],
    }
    return {name: summarize(samples, (50, 90, 95, 99)) for name, samples in rows.items()}


def success(outcomes: Sequence[bool]) -> dict[str, Any]:
    """``wins``, ``episodes``, ``success`` and its 95 % ``interval``."""
    wins, count = sum(outcomes), len(outcomes)
    low, high = wilson(wins, count)
    rate = wins / count if count else None
    return {"wins": wins, "episodes": count, "success": rate, "interval": [round(low, 9), round(high, 9)]}
