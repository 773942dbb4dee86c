"""What the numbers of an action are measured from: nothing, the state at the chunk's frame, or the pose of each step.

The trajectory holds *targets*, which stay right whatever chunk they came from: absolute rows as they are, rows
relative to the frame's state with that state added, offsets added up along the chunk. A chunk can then be entered in
its middle, and what is left of it can be re-based on a newer state before a server is told about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from sinew_client.untrusted import shown


def state_of(value: Any) -> np.ndarray:
    """Return a state as float32 [S], one NaN for what is none."""
    try:
        found = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        found = np.zeros((0, 0), np.float32)
    return found if found.ndim == 1 else np.full(1, np.nan, np.float32)


class Motion:
    """Rows as they come: numbers that the robot takes as they are.

    holds: what holding means for the robot's driver, "last" (repeat the position) or "zero" (no velocity).
    """

    needs_state = False
    holds = "last"

    def targets(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the targets [H, D] of a chunk whose frame saw ``state`` [S]."""
        return rows

    def rows(self, targets: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return targets [R, D] as a chunk whose frame saw ``state`` would express them."""
        return targets

    def commands(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the commands [H, D] that the rows of a chunk are to a robot that follows each of them."""
        return self.targets(rows, state)

    def command(self, target: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return what the robot is sent to get to ``target`` [D] when it is at ``state``."""
        return target

    def reached(self, command: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the target that a command [D] sent at ``state`` stands for."""
        return command

    def apart(self, target: np.ndarray, other: np.ndarray) -> float:
        """Return the largest difference of two targets [D], in units of an action."""
        return float(np.abs(np.asarray(target, np.float64) - other).max())

    def lacks(self, state: np.ndarray) -> str:
        """Return what a state [S] lacks to be measured from, "" if nothing."""
        return ""

    def position(self, state: np.ndarray, dim: int) -> np.ndarray:
        """Return where the robot is in the ``dim`` numbers of a command; NaN where the state does not say so."""
        return np.full(dim, np.nan, np.float32)

    def pose(self, state: np.ndarray | None, dim: int) -> np.ndarray:
        """Return where the robot is in the ``dim`` numbers of a target; NaN where the state does not say so."""
        return np.full(dim, np.nan, np.float32) if state is None else self.position(state, dim)

    def still(self, dim: int) -> np.ndarray:
        """Return the command of a robot that stands still, float [dim]; NaN where that is the last one repeated."""
        return np.full(dim, np.nan)

    def posed(self, dim: int) -> np.ndarray:
        """Return which numbers of a target are places, between which there is a way, bool [dim]."""
        return self.placed(dim)

    def placed(self, dim: int) -> np.ndarray:
        """Return of which numbers of a command a state tells where the robot is, bool [dim]."""
        return np.zeros(dim, bool)

    def roll(self, state: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the state after ``targets`` [d, D] were executed (VLASH: the state that the policy acts in)."""
        raise ValueError(
            "future state: say what the actions are measured from (absolute, relative or offsets)"
        )


@dataclass(frozen=True)
class _Columns(Motion):
    """action: columns of a row that are relative; state: the number of the state that each is measured from."""

    action: tuple[int, ...]
    state: tuple[int, ...]
    needs_state = True

    def __post_init__(self) -> None:
        if len(self.action) != len(self.state) or not self.action:
            raise ValueError(
                "columns: expected as many of the state as of the action, at least one, got"
                f" {len(self.action)} and {len(self.state)}"
            )

    def lacks(self, state: np.ndarray) -> str:
        least = max(self.state, default=-1) + 1
        return "" if len(state) >= least else f"state: expected at least {least} numbers, got {len(state)}"

    def _at(self, state: np.ndarray | None) -> np.ndarray:
        if state is None:
            raise ValueError(f"state: expected at least {max(self.state) + 1} numbers, got None")
        if reason := self.lacks(state):
            raise ValueError(reason)
        return np.asarray(state, np.float32)[list(self.state)]

    def _seen(self, state: np.ndarray, dim: int) -> np.ndarray:
        """Return the columns of a row as the state says them, NaN elsewhere, and where either has fewer numbers."""
        found = np.full(dim, np.nan, np.float32)
        if max(self.action) < dim and max(self.state) < len(state):
            found[list(self.action)] = self._at(state)
        return found

    def roll(self, state: np.ndarray, targets: np.ndarray) -> np.ndarray:
        after = np.array(state, np.float32)
        if len(targets):
            after[list(self.state)] = targets[-1][list(self.action)]
        return after


@dataclass(frozen=True)
class Absolute(_Columns):
    """Rows are targets in the numbers of the state, such as joint positions: all of them in its order, or, where the
    state has others too, columns ``action`` of a row in the numbers ``state``."""

    action: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    needs_state = False

    def __post_init__(self) -> None:
        if self.action or self.state:
            super().__post_init__()

    def position(self, state: np.ndarray, dim: int) -> np.ndarray:
        if self.action:
            return self._seen(state, dim)
        return np.asarray(state, np.float32) if len(state) == dim else super().position(state, dim)

    def placed(self, dim: int) -> np.ndarray:
        return np.isin(np.arange(dim), self.action) if self.action else np.ones(dim, bool)

    def roll(self, state: np.ndarray, targets: np.ndarray) -> np.ndarray:
        if self.action:
            return super().roll(state, targets)
        if len(targets) and targets.shape[1] != len(state):
            raise ValueError(
                f"future state: expected as many numbers as the action's {targets.shape[1]}, got {len(state)}"
            )
        return np.asarray(targets[-1], np.float32) if len(targets) else state


@dataclass(frozen=True)
class Relative(_Columns):
    """Rows relative to the state at the chunk's frame, of a robot that takes absolute targets."""

    def position(self, state: np.ndarray, dim: int) -> np.ndarray:
        return self._seen(state, dim)

    def placed(self, dim: int) -> np.ndarray:
        return np.isin(np.arange(dim), self.action)

    def targets(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        moved = np.array(rows, np.float32)
        moved[:, list(self.action)] += self._at(state)
        return moved

    def rows(self, targets: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        moved = np.array(targets, np.float32)
        moved[:, list(self.action)] -= self._at(state)
        return moved


@dataclass(frozen=True)
class Offsets(_Columns):
    """Rows whose columns are offsets from the pose of their own step, of a robot that takes such offsets.

    scale: what one unit moves the state by. low, high: range of a command. The targets of a chunk are its offsets
    added up from the state of its frame; a command is the way from the pose of the present to the target. So a chunk
    entered in its middle, after another one's path, does not add up the difference between the two.
    """

    scale: float = 1.0
    low: float = -np.inf
    high: float = np.inf
    holds = "zero"

    def still(self, dim: int) -> np.ndarray:
        return np.where(np.isin(np.arange(dim), self.action), 0.0, np.nan)

    def pose(self, state: np.ndarray | None, dim: int) -> np.ndarray:
        return self._seen(np.zeros(0) if state is None else state, dim)

    def posed(self, dim: int) -> np.ndarray:
        return np.isin(np.arange(dim), self.action)

    def commands(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        return rows

    def targets(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        moved = np.array(rows, np.float32)
        columns = list(self.action)
        moved[:, columns] = self._at(state) + self.scale * np.cumsum(moved[:, columns], axis=0)
        return moved

    def rows(self, targets: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        moved = np.array(targets, np.float32)
        columns = list(self.action)
        before = np.concatenate([self._at(state)[None], moved[:-1, columns]])
        moved[:, columns] = np.clip((moved[:, columns] - before) / self.scale, self.low, self.high)
        return moved

    def command(self, target: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        sent = np.array(target, np.float32)
        columns = list(self.action)
        sent[columns] = np.clip((sent[columns] - self._at(state)) / self.scale, self.low, self.high)
        return sent

    def apart(self, target: np.ndarray, other: np.ndarray) -> float:
        difference = np.abs(np.asarray(target, np.float64) - other)
        difference[list(self.action)] /= self.scale
        return float(difference.max())

    def reached(self, command: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        target = np.array(command, np.float32)
        columns = list(self.action)
        target[columns] = self._at(state) + self.scale * target[columns]
        return target


def parse_motion(values: Mapping[str, Any] | None) -> Motion:
    """Return the motion that a mapping with ``kind`` describes, rows as they come for none. Raises ValueError."""
    given = dict(values or {})
    kind = given.pop("kind", "as is")
    kinds = {"as is": Motion, "absolute": Absolute, "relative": Relative, "offsets": Offsets}
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("motion.kind: expected one of {}, got {}".format(", ".join(kinds), shown(kind)))
    try:
        columns = {
            name: tuple(int(i) for i in given.pop(name)) for name in ("action", "state") if name in given
        }
        for value in given.values():
            if isinstance(value, int):
                float(value)  # one beyond float64 would end the loop later
        return kinds[kind](**columns, **given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"motion: {error!s:.300}") from error


def slowed(rows: np.ndarray, start: np.ndarray, speed: float, posed: np.ndarray) -> np.ndarray:
    """Return the targets of a chunk that is played at ``speed``, 0 to 1, float32 [H / speed, D].

    rows: float32 [H, D], row k due k + 1 steps after ``start`` [D], where the robot was; NaN: not known, then the first
    row. posed: numbers that are places, which are interpolated; of the others, such as a gripper's command, each row
    stands for as long as the way leads to it.
    """
    size = int(np.floor(len(rows) / speed + 1e-9))
    at = np.round((np.arange(size) + 1.0) * speed - 1.0, 9)
    path = np.concatenate([np.where(np.isnan(start), rows[0], start)[None], rows]).astype(np.float64)
    low = np.floor(at).astype(int)
    part = (at - low)[:, None]
    following = np.minimum(low + 2, len(rows))
    between = path[low + 1] + part * (path[following] - path[low + 1])
    steps = rows[np.ceil(at).astype(int)]
    return np.where(posed, between, steps).astype(np.float32)


def interpolate(last: np.ndarray | None, row: np.ndarray, part: float) -> np.ndarray:
    """Return the point at ``part`` (0 to 1) of the way from the last command to the row of this step.

    For actuators that are faster than the control rate. Only commands and committed rows go in, so what comes
    afterwards cannot change it; the row is reached at the end of its step. Without a last command: the row itself.
    """
    share = np.float32(part)
    if last is None or share >= 1.0:  # less than 1 may be rounded to it, and the way there past the row
        return row
    return (last + (row - last) * share).astype(np.float32)
