"""Defines a finding: a statement that something about a robot looks wrong, or that this cannot be decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sinew.checks.check import Check

Level = Literal["wrong", "looks wrong", "cannot tell", "more than needed"]
WRONG: Level = "wrong"
LOOKS_WRONG: Level = "looks wrong"
CANNOT_TELL: Level = "cannot tell"
SPARE: Level = "more than needed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about a camera, a joint or another part of a robot that looks wrong, costs time without need, or
    cannot be checked.

    Attributes:
        subject: The camera, joint or part.
        level: "wrong" is certain, "looks wrong" is beyond a margin, "cannot tell" cannot be decided, and "more than
            needed" only costs time.
        kind: One or a few words for programs, independent of the numbers.
        seen: The observed value as text.
        expected: The expected value as text.
        advice: The next step for the user.
    """

    subject: str
    level: Level
    kind: str
    seen: str
    expected: str = ""
    advice: str = ""

    @property
    def amiss(self) -> bool:
        """Return True if something is wrong or looks wrong."""
        return self.level in (WRONG, LOOKS_WRONG)

    @property
    def told(self) -> str:
        """Return the observed and the expected value as text."""
        return f"{self.seen}; expected {self.expected}" if self.expected else self.seen

    def check(self) -> Check:
        """Return the finding as a line of ``sinew doctor``."""
        status: Literal["ok", "fail"] = "fail" if self.amiss else "ok"
        return Check(self.subject, status, f"{self.level}: {self.told}", self.advice)
