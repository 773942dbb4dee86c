"""Estimate the delay of the next chunk from recent requests."""

from __future__ import annotations

from collections import deque

# The delay is estimated from this many recent requests, as in Black et al. 2025 (arXiv 2506.07339).
WINDOW = 10


class DelayEstimate:
    """Estimates the delay from a request to its chunk, in control steps, from the last ten requests.

    The estimate is the second largest of these delays, or the largest if there are fewer than five. So it covers the
    usual jitter, but not a single slow request. The first request after a start or a reconnect includes compilation,
    allocation and connection. It counts only until the next request was measured.
    """

    def __init__(self) -> None:
        self._delays: deque[int] = deque(maxlen=WINDOW)
        self._initial, self._first = 0, True

    def add(self, steps: int) -> None:
        """Record a request whose answer arrived ``steps`` control steps after the request."""
        if self._first:
            self._initial, self._first = max(steps, 0), False
        else:
            self._delays.append(max(steps, 0))

    def reconnected(self) -> None:
        """Record a reconnect. The next request then counts as a first request, because it includes the connection."""
        self._first = True

    @property
    def steps(self) -> int:
        """Expected number of control steps from a request until its chunk arrives."""
        if not self._delays:
            return self._initial
        ordered = sorted(self._delays)
        return ordered[-2] if len(ordered) >= 5 else ordered[-1]
