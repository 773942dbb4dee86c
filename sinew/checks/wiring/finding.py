"""Findings say what looks wrong about a robot, or cannot be told."""

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
    """subject: the camera, joint or part that it is about. level: "wrong" is certain, "looks wrong" is beyond a margin,
    "cannot tell" is what nothing here decides, "more than needed" costs time alone. kind: one word or a
    few for programs, the same whatever the numbers.
    """

    subject: str
    level: Level
    kind: str
    seen: str
    expected: str = ""
    advice: str = ""

    @property
    def amiss(self) -> bool:
        """Return whether something is wrong, or looks so."""
        return self.level in (WRONG, LOOKS_WRONG)

    @property
    def told(self) -> str:
        """The observed and the expected value, in words."""
        return f"{self.seen}; expected {self.expected}" if self.expected else self.seen

    def check(self) -> Check:
        """Return it as a line of ``sinew doctor``."""
        status: Literal["ok", "fail"] = "fail" if self.amiss else "ok"
        return Check(self.subject, status, f"{self.level}: {self.told}", self.advice)
