"""Who commands the robot: the policy, a person at a leader, or the return at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sinew_client.errors import ClientError

POLICY, ALIGNING, HUMAN = "policy", "aligning", "human"
RETURNING = "returning"  # the run has ended, and the robot returns to its rest pose
ALIGNS = "taking over: the leader is brought to where the robot is"
SILENT = "the leader says nothing"


class LeaderError(ClientError):
    """A leader cannot be opened, or does not fit the policy; the message says what was expected."""


class Leader(Protocol):
    """Drive a robot in place of the policy. Each call should return well within a period.

    Optional: ``wanted``, a bool that a button of its own changes: True takes over, False hands back.
    ``align(position)`` moves the leader, float [D], towards where the robot is, NaN where that is not known. It is
    called in each control step, and bounds the speed itself: a hand may be on the leader. ``free()`` lets go of it when
    it is there. One without them is moved by the person who takes over. ``close()`` at
    the end.
    """

    def read(self) -> Any:
        """Return the command that the leader stands for now, float [D] in the policy's units; None for none."""


@dataclass
class HandedOver:
    """Hold what is known of hand-overs. to_human, to_policy: how many. steps: control steps with a human's command.

    largest: the largest difference between the first command after a hand-over and the one before it, and ``number``,
    whose it was. unknown: hand-overs from a place that was not known.
    """

    to_human: int = 0
    to_policy: int = 0
    steps: int = 0
    largest: float = 0.0
    number: str = ""
    unknown: int = 0
    _due: bool = field(default=False, repr=False)

    def changed(self, driver: str) -> None:
        """Note a hand-over."""
        self.to_human += driver == HUMAN
        self.to_policy += driver == POLICY
        self._due = True

    def commanded(self, row: np.ndarray, before: np.ndarray | None, names: tuple[str, ...]) -> None:
        """Note a command, float32 [D], and the one before."""
        if not self._due:
            return
        self._due = False
        if before is None or np.all(np.isnan(before)):
            self.unknown += 1
            return
        moved = np.abs(np.asarray(row, np.float64) - before)
        worst = int(np.nanargmax(moved))
        if moved[worst] >= self.largest:
            self.largest = float(moved[worst])
            self.number = names[worst] if worst < len(names) else str(worst)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; none where nobody has taken over."""
        if not (self.to_human or self.to_policy):
            return {}
        names = ("to_human", "to_policy", "steps", "largest", "number", "unknown")
        return {name: getattr(self, name) for name in names}

    def text(self) -> str:
        """Return the hand-overs for people."""
        lost = f", {self.unknown} from a place that was not known" if self.unknown else ""
        return (
            f"{self.to_human} to a human, {self.to_policy} back, {self.steps} steps by hand; largest step at a"
            f" hand-over {self.largest:.4g} ({self.number or '-'}){lost}"
        )
