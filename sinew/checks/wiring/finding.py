"""What looks wrong about a robot, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sinew.checks.check import Check

Level = Literal["wrong", "looks wrong", "cannot tell"]
WRONG: Level = "wrong"
LOOKS_WRONG: Level = "looks wrong"
CANNOT_TELL: Level = "cannot tell"


@dataclass(frozen=True, slots=True)
class Finding:
    """subject: the camera, joint or part that it is about. level: "wrong" is certain, "looks wrong" is beyond a margin,
    and "cannot tell" is what nothing here decides. kind: one word or a few for programs, the same whatever the numbers.
    """

    subject: str
    level: Level
    kind: str
    seen: str
    expected: str = ""
    advice: str = ""

    def check(self) -> Check:
        """Return it as a line of ``sinew doctor``."""
        expected = f"; expected {self.expected}" if self.expected else ""
        status: Literal["ok", "fail"] = "ok" if self.level == CANNOT_TELL else "fail"
        return Check(self.subject, status, f"{self.level}: {self.seen}{expected}", self.advice)
