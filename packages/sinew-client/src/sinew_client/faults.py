"""Separate errors of a run from normal operation: late, lost and superseded answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sinew_client.errors import ConnectionLost, LateChunk, RequestTimeout

# With these codes, a server reports that it did not compute a request, for a reason that is part of normal operation.
UNCOMPUTED = ("busy", "cancelled", "deadline", "shutting_down", "superseded")
# With these codes, all further requests of this robot will fail too, because the policy, the robot or the key is wrong.
PERMANENT = ("bad_observation", "bad_request", "missing_package", "unauthorized", "unknown_policy")

# The report stores at most KINDS kinds of errors. A kind has at most LONGEST_KIND characters, and the text of an error
# at most LONGEST_TEXT characters.
KINDS, LONGEST_KIND, LONGEST_TEXT = 100, 64, 1000


def kind_of(error: BaseException) -> str:
    """Return the kind of an error: a server's code, or the name of its type.

    The kind is "" if the answer came too late or not at all: after a deadline, with a lost connection, or if the server
    is busy, stops, or got a newer request. The robot then holds, requests again and continues.
    """
    code = getattr(error, "code", "")
    if isinstance(error, (RequestTimeout, ConnectionLost, LateChunk)) or code in UNCOMPUTED:
        return ""
    return code[:LONGEST_KIND] if isinstance(code, str) and code else type(error).__name__


class Faults:
    """Counts failed answers.

    Attributes:
        first: Text of the first failed answer.
        counts: Kind -> number of failed answers.
    """

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
        """Return a line of text about all failed answers; "" if there are none."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.counts.most_common())
        return f"{kinds}; the first: {self.first}" if kinds else ""

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.total, "kinds": dict(self.counts), "first": self.first}
