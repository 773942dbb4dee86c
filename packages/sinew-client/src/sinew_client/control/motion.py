"""The reference of actions: none, the state at the chunk's frame, or the pose of each step.

The trajectory holds *targets*, which do not depend on their chunk. A target is an absolute action unchanged, a relative
action plus the state at the chunk's frame, or the sum of the delta actions along the chunk. So a chunk can be entered
in its middle, and its remaining actions can be re-based on a newer state for a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from sinew_client.untrusted import shown


def state_of(value: Any) -> np.ndarray:
    """Return a state as float32 [S]. If the value is not a state, return an array with one NaN."""
    try:
        state = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        state = np.zeros((0, 0), np.float32)
    return state if state.ndim == 1 else np.full(1, np.nan, np.float32)


class Motion:
    """Actions without a known reference: the robot gets the numbers unchanged.

    Attributes:
        holds: How the robot's driver holds: "last" repeats the position, "zero" sends zero velocity.
    """

    needs_state = False
    holds = "last"

    def targets(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the targets [H, D] of a chunk whose frame has ``state`` [S]."""
        return rows

    def rows(self, targets: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Convert targets [R, D] to actions of a chunk whose frame has ``state``."""
        return targets

    def commands(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the commands [H, D] for a robot that follows every action of a chunk."""
        return self.targets(rows, state)

    def command(self, target: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the command that brings the robot from ``state`` to ``target`` [D]."""
        return target

    def reached(self, command: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the target of a command [D] that is sent at ``state``."""
        return command

    def apart(self, target: np.ndarray, other: np.ndarray) -> float:
        """Return the largest difference of two targets [D], in units of an action."""
        return float(np.abs(np.asarray(target, np.float64) - other).max())

    def lacks(self, state: np.ndarray) -> str:
        """Return an error if the state [S] has too few numbers for this motion, else ""."""
        return ""

    def position(self, state: np.ndarray, dim: int) -> np.ndarray:
        """Return the robot's position in the ``dim`` numbers of a command; NaN where the state does not contain it."""
        return np.full(dim, np.nan, np.float32)

    def pose(self, state: np.ndarray | None, dim: int) -> np.ndarray:
        """Return the robot's position in the ``dim`` numbers of a target; NaN where the state does not contain it."""
        return np.full(dim, np.nan, np.float32) if state is None else self.position(state, dim)

    def still(self, dim: int) -> np.ndarray:
        """Return the command of a standing robot, float [dim]; NaN where the robot repeats its last command."""
        return np.full(dim, np.nan)

    def posed(self, dim: int) -> np.ndarray:
        """Return True for the numbers of a target that are positions and can be interpolated, bool [dim]."""
        return self.placed(dim)

    def placed(self, dim: int) -> np.ndarray:
        """Return True for the numbers of a command whose position the state contains, bool [dim]."""
        return np.zeros(dim, bool)

    def roll(self, state: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the state after ``targets`` [d, D] were executed (VLASH: the state in which the chunk will start)."""
        raise ValueError(
            "future: needs a motion (absolute, relative or offsets), got none; set --motion, or omit --future"
        )


@dataclass(frozen=True)
class _Columns(Motion):
    """Motion of some columns.

    Attributes:
        action: Columns of an action.
        state: Index into the state for each of these columns.
    """

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
        """Return the position in the columns of an action, from the state.

        All other numbers are NaN. All are NaN if the action or the state has too few numbers.
        """
        position = np.full(dim, np.nan, np.float32)
        if max(self.action) < dim and max(self.state) < len(state):
            position[list(self.action)] = self._at(state)
        return position

    def roll(self, state: np.ndarray, targets: np.ndarray) -> np.ndarray:
        after = np.array(state, np.float32)
        if len(targets):
            after[list(self.state)] = targets[-1][list(self.action)]
        return after


@dataclass(frozen=True)
class Absolute(_Columns):
    """Actions are targets in the numbers of the state, such as joint positions.

    Without columns, all numbers are in the order of the state. With columns, the columns ``action`` are targets for
    the numbers ``state`` of a state that has further numbers.
    """

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
                f"future: expected a state of {targets.shape[1]} numbers (as the action), got {len(state)}"
            )
        return np.asarray(targets[-1], np.float32) if len(targets) else state


@dataclass(frozen=True)
class Relative(_Columns):
    """Actions relative to the state at the chunk's frame, for a robot that takes absolute targets."""

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
    """Delta actions: some columns are relative to the pose of their own step. The robot takes such commands.

    The targets of a chunk are the sums of its delta actions, from the state of its frame on. A command is the
    difference between the target and the present pose. So a chunk that is entered in its middle does not add its
    difference from the previous chunk to the motion.

    Attributes:
        scale: Change of the state by one unit of an action.
        low: Smallest command.
        high: Largest command.
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
    """Read a motion.

    Args:
        values: A mapping with ``kind``, as ``Settings.motion``; None for actions without a reference.

    Returns:
        The motion.

    Raises:
        ValueError: The mapping describes no motion.
    """
    options = dict(values or {})
    kind = options.pop("kind", "as is")
    kinds = {"as is": Motion, "absolute": Absolute, "relative": Relative, "offsets": Offsets}
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("motion.kind: expected one of {}, got {}".format(", ".join(kinds), shown(kind)))
    try:
        columns = {
            name: tuple(int(i) for i in options.pop(name)) for name in ("action", "state") if name in options
        }
        for value in options.values():
            if isinstance(value, int):
                # Convert now, because an integer too large for float64 would raise OverflowError inside the loop later.
                float(value)
        return kinds[kind](**columns, **options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"motion: {error!s:.300}") from error


def slowed(rows: np.ndarray, start: np.ndarray, speed: float, posed: np.ndarray) -> np.ndarray:
    """Return the targets of a chunk that is played at ``speed``, float32 [H / speed, D].

    Args:
        rows: float32 [H, D]. Action k is due k + 1 steps after ``start``.
        start: [D], position before the chunk. An unknown number is NaN and is taken from the first action.
        speed: Share of the original speed, above 0 and at most 1.
        posed: Numbers that are positions, which are interpolated. Other numbers, such as a gripper command, change
            when the motion has reached their action.
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
    """Return the point at ``part`` (0 to 1) of the way from the last command to this step's action.

    Actuators with a higher rate use it. The result depends only on the last command and the committed action, so later
    chunks cannot change it. The action is reached at the end of its step. Without a last command, the result is the
    action itself.
    """
    share = np.float32(part)
    # At the end of the step, return the action itself, because rounding in the sum below could exceed it.
    if last is None or share >= 1.0:
        return row
    return (last + (row - last) * share).astype(np.float32)
