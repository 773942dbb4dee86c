"""The driver of a robot: the policy, a human at a leader, or the return to the rest pose at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sinew_client.errors import ClientError

POLICY, ALIGNING, HUMAN = "policy", "aligning", "human"
RETURNING = "returning"  # state after the run: the robot returns to its rest pose
ALIGNS = "taking over: the leader moves to the robot's position"
SILENT = "the leader sends no command"


class LeaderError(ClientError):
    """The leader cannot be opened, or does not fit the policy. The message states the reason."""


class Leader(Protocol):
    """The interface of a leader, such as a leader arm, which drives the robot in place of the policy.

    Each method should return well within a control period. Optional members:

    * ``wanted``: a bool that a button of the leader changes. True takes over, False hands back.
    * ``align(position)``: moves the leader one step towards the robot's position, float [D] with NaN for unknown
    numbers. The loop calls the method in each control step until the leader is aligned. The method must limit the
    leader's speed, because a person's hand may be on the leader. Without this method, the person moves the leader.
    * ``free()``: switches the leader's motors off when the leader is aligned.
    * ``close()``: called at the end of the run.
    """

    def read(self) -> Any:
        """Return the leader's present command, float [D] in robot units; None if the leader has no command."""


@dataclass
class AuthorityChange:
    """Counts the changes of the driver between policy and human.

    Attributes:
        to_human: Number of changes from the policy to the human.
        to_policy: Number of changes from the human to the policy.
        steps: Number of control steps with a command of the human.
        largest: Largest difference between the first command after a change and the last command before it, robot
            units.
        number: Name of the joint with this largest difference.
        unknown: Number of changes for which the last command before the change was unknown.
    """

    to_human: int = 0
    to_policy: int = 0
    steps: int = 0
    largest: float = 0.0
    number: str = ""
    unknown: int = 0
    _due: bool = field(default=False, repr=False)

    def changed(self, driver: str) -> None:
        """Record that ``driver`` ("human" or "policy") drives from now on."""
        self.to_human += driver == HUMAN
        self.to_policy += driver == POLICY
        self._due = True

    def commanded(self, row: np.ndarray, before: np.ndarray | None, names: tuple[str, ...]) -> None:
        """Measure the first command after a change of the driver.

        Args:
            row: The command, float32 [D].
            before: The command before it, float [D] with NaN for unknown numbers; None if it is unknown.
            names: Names of the joints.
        """
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
        """Return the counts as a dict; {} if there was no take-over."""
        if not (self.to_human or self.to_policy):
            return {}
        names = ("to_human", "to_policy", "steps", "largest", "number", "unknown")
        return {name: getattr(self, name) for name in names}

    def text(self) -> str:
        """Return the counts as one line of text for the report of a run."""
        lost = f", {self.unknown} from an unknown position" if self.unknown else ""
        return (
            f"{self.to_human} to a human, {self.to_policy} back, {self.steps} steps by hand; largest step at a"
            f" hand-over {self.largest:.4g} ({self.number or '-'}){lost}"
        )
