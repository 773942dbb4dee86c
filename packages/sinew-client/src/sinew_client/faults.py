"""Distinguish errors of a run from normal operation, such as late, lost and superseded answers."""

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
    """Classify the error of a request.

    Args:
        error: The exception.

    Returns:
        The code that the server sent, or the name of the exception's type. "" if the failure is part of normal
        operation: a timeout, a lost connection, or a server that is busy, stops, or got a newer request. The robot then
        holds, requests again and continues.
    """
    code = getattr(error, "code", "")
    if isinstance(error, (RequestTimeout, ConnectionLost, LateChunk)) or code in UNCOMPUTED:
        return ""
    return code[:LONGEST_KIND] if isinstance(code, str) and code else type(error).__name__


class Faults:
    """Counts the errors of a run by kind.

    Attributes:
        first: Text of the first error.
        counts: Number of errors, by kind.
    """

    def __init__(self) -> None:
        self.first = ""
        self.counts: Counter = Counter()

    def add(self, kind: str, text: str) -> None:
        """Record an error with its kind (:func:`kind_of`) and its text."""
        self.first = self.first or text[:LONGEST_TEXT]
        self.counts[kind if kind in self.counts or len(self.counts) < KINDS else "other"] += 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """Return the counts and the first error as one line of text; "" if there are no errors."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.counts.most_common())
        return f"{kinds}; the first: {self.first}" if kinds else ""

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.total, "kinds": dict(self.counts), "first": self.first}
