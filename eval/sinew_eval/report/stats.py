"""Statistics of success: paired tests and rates. `sinew/core/statistics.py` has intervals and percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinew.core.statistics import Z95, wilson


@dataclass(frozen=True, slots=True)
class McNemar:
    """Paired comparison of two variants over the same seeds.

    Attributes:
        pairs: Number of seeds that both variants played.
        only_first: Number of seeds at which only the first variant succeeded.
        only_second: Number of seeds at which only the second variant succeeded.
        p_value: Two-sided p-value of McNemar's exact test.
    """

    pairs: int
    only_first: int
    only_second: int
    p_value: float


def mcnemar(first: Mapping[int, bool], second: Mapping[int, bool]) -> McNemar:
    """Run McNemar's exact two-sided test over the seeds that both variants played (McNemar 1947, binomial form).

    Under equal success, each discordant pair favours either variant with probability 1/2. Pairs with equal outcomes
    carry no information. With b and c discordant pairs and n = b + c, p = min(1, 2 P[Binomial(n, 1/2) <= min(b, c)]).

    Args:
        first: For each seed, True if the first variant succeeded.
        second: For each seed, True if the second variant succeeded.

    Returns:
        The counts and the p-value.
    """
    seeds = first.keys() & second.keys()
    only_first = sum(first[seed] and not second[seed] for seed in seeds)
    only_second = sum(second[seed] and not first[seed] for seed in seeds)
    return McNemar(len(seeds), only_first, only_second, binomial_p(only_first, only_second))


def binomial_p(b: int, c: int) -> float:
    """Return the two-sided exact p-value of ``b`` heads and ``c`` tails if the coin is fair."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2**n)


# For at most this many pairs, the exact power is computed too. The normal approximation can be too small there, because
# McNemar's exact test needs at least six discordant pairs.
FEW = 50
Z80 = 0.8416212335729143  # quantile of the standard normal distribution at 0.8


def pairs_needed(pairs: int, only_first: int, only_second: int) -> int | None:
    """Return the number of pairs with which McNemar's test at 5 % shows the observed difference in about four of five
    runs.

    Formula of Connor 1987 (Biometrics 43, 207 to 211): n = (z_a sqrt(p) + z_b sqrt(p - d^2))^2 / d^2, with the
    difference d and the share p of discordant pairs. For few pairs, the number is increased until the exact test has
    enough power.

    Args:
        pairs: Observed pairs.
        only_first: Pairs in which only the first variant succeeded.
        only_second: Pairs in which only the second variant succeeded.

    Returns:
        The number of pairs. None if no difference was observed.
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
    """Return the probability that McNemar's exact test at 5 % shows a difference.

    Args:
        pairs: Number of pairs.
        only_first: Share of pairs in which only the first variant succeeds.
        only_second: Share of pairs in which only the second variant succeeds.
    """
    agree, power = max(0.0, 1 - only_first - only_second), 0.0
    for b in range(pairs + 1):
        for c in range(pairs - b + 1):
            if binomial_p(b, c) <= 0.05:
                ways = math.comb(pairs, b) * math.comb(pairs - b, c)
                power += ways * only_first**b * only_second**c * agree ** (pairs - b - c)
    return power


def anytime_p(disputed: Sequence[bool]) -> float:
    """Return a p-value for the hypothesis of equal success. It stays valid if the test stops at any time, for any
    reason.

    Under equal success, the discordant pairs are tosses of a fair coin. E = 2^n B(b + 1, c + 1) is a uniform mixture
    over all other coins. It is a martingale that begins at 1, so the chance that it ever reaches 1 / a is at most a
    (Ville 1939; Robbins 1970, Annals of Mathematical Statistics 41, 1397 to 1409). Therefore p = 1 / max E.

    Args:
        disputed: For each discordant pair, in the order of completion, True if the first variant won.
    """
    won, smallest = 0, 1.0
    for count, first in enumerate(disputed, 1):
        won += first
        smallest = min(smallest, (count + 1) * math.comb(count, won) / 2**count)
    return smallest


def paired_difference(first: Mapping[int, bool], second: Mapping[int, bool]) -> tuple[float, float, float]:
    """Return the difference of success over the seeds that both variants played, and its 95 % interval.

    Method 10 of Newcombe 1998 (Statistics in Medicine 17, 2635 to 2650) combines the score intervals of both variants
    with their correlation.

    Args:
        first: For each seed, True if the first variant succeeded.
        second: For each seed, True if the second variant succeeded.

    Returns:
        Success of the first variant minus success of the second variant, and the lower and upper end of the interval.
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
        # Reduce the numerator of the correlation by n / 2, but not below 0 (correction for continuity).
        spread = max(spread - n / 2, 0.0)
    scale = math.sqrt(math.prod(win * (n - win) for win in wins))
    phi = spread / scale if scale else 0.0
    difference = (wins[0] - wins[1]) / n
    below = math.sqrt(max(0.0, low1**2 - 2 * phi * low1 * high2 + high2**2))
    above = math.sqrt(max(0.0, high1**2 - 2 * phi * high1 * low2 + low2**2))
    return difference, difference - below, difference + above


def amortized_rate(steps: float, latency_ms: float) -> float:
    """Return the control rate that inference alone would allow, in Hz. It is an upper bound of the real rate.

    Args:
        steps: Number of actions executed per inference.
        latency_ms: Time of an inference, in milliseconds.
    """
    return 1e3 * steps / latency_ms if latency_ms > 0 else math.inf


def success(outcomes: Sequence[bool]) -> dict[str, Any]:
    """Return the number of ``wins`` and ``episodes``, the ``success`` rate, and its 95 % ``interval``."""
    wins, count = sum(outcomes), len(outcomes)
    low, high = wilson(wins, count)
    rate = wins / count if count else None
    return {"wins": wins, "episodes": count, "success": rate, "interval": [round(low, 9), round(high, 9)]}
