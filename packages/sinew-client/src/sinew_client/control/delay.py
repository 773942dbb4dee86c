"""How late the next chunk will be: an estimate from the recent requests."""

from __future__ import annotations

from collections import deque

WINDOW = 10  # requests that count; Black et al. 2025 keep as many


class DelayEstimate:
    """The delay to expect, in control steps, from the last ten requests.

    The estimate is the second largest of them (the largest, while there are fewer than five): late enough for the
    usual jitter, and one request that took ten times as long does not stay for ever. The first request after the
    start or after a reconnect compiles, allocates and connects; it counts only until another one was measured.
    """

    def __init__(self) -> None:
        self._delays: deque[int] = deque(maxlen=WINDOW)
        self._initial, self._first = 0, True

    def add(self, steps: int) -> None:
        """Count a request that was answered ``steps`` control steps after it was sent."""
        if self._first:
            self._initial, self._first = max(steps, 0), False
        else:
            self._delays.append(max(steps, 0))

    def reconnected(self) -> None:
        """Treat the next request as a first one: it pays for the connection. What was measured before stays."""
        self._first = True

    @property
    def steps(self) -> int:
        """Return the control steps to expect from request to chunk."""
        if not self._delays:
            return self._initial
        ordered = sorted(self._delays)
        return ordered[-2] if len(ordered) >= 5 else ordered[-1]
