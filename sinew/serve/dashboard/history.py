"""Counts and latencies of the last hour's answers, collected with or without viewers. A page shows them when it opens.

Each answer adds to a histogram under a lock, and no answers are stored. Quantiles come from the histogram's bins,
each of which ends 10 % above its beginning.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SPAN_S = 10  # length of one point, seconds
SPANS = 360  # number of points, which cover an hour
RATIO = 1.1  # ratio of a histogram bin's upper bound to its lower bound


@dataclass
class _Span:
    began: int  # seconds since the epoch
    answers: int = 0
    missed: int = 0
    refused: int = 0
    most: float = 0.0
    bins: Counter[int] = field(default_factory=Counter)

    def quantile(self, share: float) -> float:
        """Return a latency quantile in milliseconds: the upper end of the histogram bin that contains it. ``share`` of
        the answers took at most this long.
        """
        rank, below = math.ceil(share * self.bins.total()), 0
        for number in sorted(self.bins):
            below += self.bins[number]
            if below >= rank:
                return round(min(RATIO ** (number + 1), self.most), 3)
        return 0.0


class HourHistory:
    """Counts and latencies of the last hour, with a point for every ten seconds with requests. Thread-safe.

    Args:
        clock: Returns the seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: deque[_Span] = deque(maxlen=SPANS)

    def put(self, ms: float, missed: bool, refused: bool) -> None:
        """Count a request.

        Args:
            ms: Milliseconds from the request's arrival to its answer.
            missed: True if the answer came after the deadline.
            refused: True if the request was rejected. ``ms`` is not counted then.
        """
        now = int(self._clock()) // SPAN_S * SPAN_S
        with self._lock:
            if not self._spans or self._spans[-1].began < now:
                self._spans.append(_Span(now))
            span = self._spans[-1]
            span.missed += missed
            if refused:
                span.refused += 1
                return
            span.answers += 1
            # A latency that is NaN or infinite has no histogram bin. Only the answer is counted.
            if not math.isfinite(ms):
                return
            span.most = max(span.most, ms)
            span.bins[math.floor(math.log(max(ms, 1e-3), RATIO))] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the points, oldest first, as values for JSON. Times are in milliseconds, except ``time``, which is the
        beginning of a span."""
        oldest = self._clock() - SPAN_S * SPANS
        with self._lock:
            points = [
                {
                    "time": each.began,
                    "answers": each.answers,
                    "missed": each.missed,
                    "refused": each.refused,
                    "p50_ms": each.quantile(0.5),
                    "p95_ms": each.quantile(0.95),
                    "max_ms": round(each.most, 3),
                }
                for each in self._spans
                if each.began > oldest
            ]
        return {"span_s": SPAN_S, "spans": SPANS, "now": round(self._clock(), 3), "points": points}
