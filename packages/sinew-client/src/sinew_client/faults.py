"""Tells errors inside a run from what is normal life of a robot: late, lost and superseded answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sinew_client.errors import ConnectionLost, LateChunk, RequestTimeout

# Requests that a server did not compute, for a reason that is nobody's mistake.
UNCOMPUTED = ("busy", "cancelled", "deadline", "shutting_down", "superseded")
# What will be answered to every observation of this robot: policy, robot or key are not the right ones.
PERMANENT = ("bad_observation", "bad_request", "missing_package", "unauthorized", "unknown_policy")

KINDS, LONGEST_KIND, LONGEST_TEXT = 100, 64, 1000  # of what a server may say: kinds, and characters


def kind_of(error: BaseException) -> str:
    """Return the kind of an error that an answer failed with: a server's code, or the name of its type.

    "" for an answer that came too late, or not at all: a deadline, a lost connection, a server that is busy, stops or
    was sent something newer. The robot holds then, asks again and goes on.
    """
    code = getattr(error, "code", "")
    if isinstance(error, (RequestTimeout, ConnectionLost, LateChunk)) or code in UNCOMPUTED:
        return ""
    return code[:LONGEST_KIND] if isinstance(code, str) and code else type(error).__name__


class Faults:
    """Counts answers that failed. ``first``: what the first one said; ``counts``: how many of which kind."""

    def __init__(self) -> None:
        self.first = ""
        self.counts: Counter = Counter()

    def add(self, kind: str, text: str) -> None:
        self.first = self.first or text[:LONGEST_TEXT]
        self.counts[kind if kind in self.counts or len(self.counts) < KINDS else "other"] += 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """Return one line for people, "" where nothing failed."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.counts.most_common())
        return f"{kinds}; the first: {self.first}" if kinds else ""

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.total, "kinds": dict(self.counts), "first": self.first}
