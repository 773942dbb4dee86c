"""The driver of a robot: the policy, a human at a leader, or the return to the rest pose at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sinew_client.errors import ClientError

POLICY, ALIGNING, HUMAN = "policy", "aligning", "human"
RETURNING = "returning"  # after the run, while the robot returns to its rest pose
ALIGNS = "taking over: the leader moves to the robot's position"
SILENT = "the leader sends no command"


class LeaderError(ClientError):
    """The leader cannot be opened, or does not fit the policy; the message names the reason."""


class Leader(Protocol):
    """Drives a robot in place of the policy, such as a leader arm. Each call should return well within a period.

    Optional members:

    * ``wanted``: a bool that a button of the leader changes. True takes over, False hands back.
    * ``align(position)``: moves the leader towards the robot's position, float [D]; unknown numbers are NaN. The loop
    calls it in each control step. It must limit the leader's speed, because a hand may be on the leader. Without this
    method, the human moves the leader.
    * ``free()``: releases the motors when the leader has the robot's position.
    * ``close()``: called at the end of the run.
    """

    def read(self) -> Any:
        """Return the leader's present command, float [D] in the policy's units; None without a command."""


@dataclass
class AuthorityChange:
    """Counts of hand-overs between policy and human.

    Attributes:
        to_human: Hand-overs to the human.
        to_policy: Hand-overs to the policy.
        steps: Control steps with a human's command.
        largest: Largest difference between the first command after a hand-over and the one before it.
        number: Name of the number with that difference.
        unknown: Hand-overs without a known command before them.
    """

    to_human: int = 0
    to_policy: int = 0
    steps: int = 0
    largest: float = 0.0
    number: str = ""
    unknown: int = 0
    _due: bool = field(default=False, repr=False)

    def changed(self, driver: str) -> None:
        """Record a hand-over."""
        self.to_human += driver == HUMAN
        self.to_policy += driver == POLICY
        self._due = True

    def commanded(self, row: np.ndarray, before: np.ndarray | None, names: tuple[str, ...]) -> None:
        """Record a command, float32 [D], and the command before it."""
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
        """Return plain values; {} if there was no take-over."""
        if not (self.to_human or self.to_policy):
            return {}
        names = ("to_human", "to_policy", "steps", "largest", "number", "unknown")
        return {name: getattr(self, name) for name in names}

    def text(self) -> str:
        """Return the counts as a line of text."""
        lost = f", {self.unknown} from a place that was not known" if self.unknown else ""
        return (
            f"{self.to_human} to a human, {self.to_policy} back, {self.steps} steps by hand; largest step at a"
            f" hand-over {self.largest:.4g} ({self.number or '-'}){lost}"
        )
