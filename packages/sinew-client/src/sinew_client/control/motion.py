"""The motion of a policy: what its actions are relative to, and how they become commands for the robot.

An action is absolute, or relative to the state at the chunk's observation, or relative to the pose of its own step (a
delta action). The trajectory stores *targets*, which do not depend on the chunk:

* of an absolute action: the action itself,
* of a relative action: the action plus the state at the chunk's observation,
* of a delta action: the sum of the delta actions from the start of the chunk on.

With targets, the robot can start in the middle of a late chunk. The remaining targets can also be converted back to
actions relative to a newer state, for the next request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from sinew_client.untrusted import shown


def state_of(value: Any) -> np.ndarray:
    """Convert a value to a state, float32 [S]. If it is not a list of numbers, return an array with a single NaN."""
    try:
        state = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        state = np.zeros((0, 0), np.float32)
    return state if state.ndim == 1 else np.full(1, np.nan, np.float32)


class Motion:
    """The motion of actions whose reference is unknown. The robot gets the actions unchanged.

    Attributes:
        needs_state: True if a command depends on the state in its control step.
        holds: How the robot holds: "last" repeats the last position, "zero" sends zero velocity.
    """

    needs_state = False
    holds = "last"

    def targets(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Convert the actions of a chunk to targets.

        Args:
            rows: The actions, float [H, D].
            state: State at the chunk's observation, [S].
        """
        return rows

    def rows(self, targets: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Convert targets [R, D] back to the actions of a chunk whose observation has ``state`` [S]."""
        return targets

    def commands(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Convert a chunk [H, D] to the commands of a robot that starts at ``state`` [S] and executes all actions of
        the chunk.
        """
        return self.targets(rows, state)

    def command(self, target: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the command [D] that moves the robot from ``state`` [S] to ``target`` [D]."""
        return target

    def reached(self, command: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """Return the target [D] that a command [D] reaches if it is sent while the robot's state is ``state`` [S]."""
        return command

    def apart(self, target: np.ndarray, other: np.ndarray) -> float:
        """Return the largest difference between the values of two targets [D], in units of an action."""
        return float(np.abs(np.asarray(target, np.float64) - other).max())

    def lacks(self, state: np.ndarray) -> str:
        """Return an error text if the state [S] has too few values for this motion, else ""."""
        return ""

    def position(self, state: np.ndarray, dim: int) -> np.ndarray:
        """Extract the robot's position from a state, float32 [dim] in the order of a command, with NaN for unknown
        values.
        """
        return np.full(dim, np.nan, np.float32)

    def pose(self, state: np.ndarray | None, dim: int) -> np.ndarray:
        """Extract the robot's position from a state, float32 [dim] in the order of a target, with NaN for unknown
        values.
        """
        return np.full(dim, np.nan, np.float32) if state is None else self.position(state, dim)

    def still(self, dim: int) -> np.ndarray:
        """Return the command that keeps the robot in place, float [dim], with NaN where it repeats its last command."""
        return np.full(dim, np.nan)

    def posed(self, dim: int) -> np.ndarray:
        """Return which values of a target are positions and can be interpolated, bool [dim]."""
        return self.placed(dim)

    def placed(self, dim: int) -> np.ndarray:
        """Return which values of a command are positions that the state contains too, bool [dim]."""
        return np.zeros(dim, bool)

    def roll(self, state: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Predict the state [S] after ``targets`` [d, D] were executed. Requests that are sent in advance use this
        state (VLASH).
        """
        raise ValueError(
            "future: needs a motion (absolute, relative or offsets), got none; set --motion, or omit future"
        )


@dataclass(frozen=True)
class _Columns(Motion):
    """Base class of motions in which some values of an action correspond to values of the state.

    Attributes:
        action: Indices of these values in an action.
        state: Indices of the same values in the state.
    """

    action: tuple[int, ...]
    state: tuple[int, ...]
    needs_state = True

    def __post_init__(self) -> None:
        if len(self.action) != len(self.state) or not self.action:
            raise ValueError(
                "motion: expected lists of indices of equal length, at least 1, in action and state, got"
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
        """Extract the position from a state, float32 [dim] in the order of an action, with NaN for other values.

        All values are NaN if the action or the state has too few values.
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
    """Actions are absolute targets, such as joint positions, in the units of the state.

    Without indices, action and state have the same values in the same order. With indices, the values ``action`` of an
    action are targets for the values ``state`` of the state.
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
                f"future: expected a state of {targets.shape[1]} values (as many as the action), got {len(state)}"
            )
        return np.asarray(targets[-1], np.float32) if len(targets) else state


@dataclass(frozen=True)
class Relative(_Columns):
    """Actions are relative to the state at the chunk's observation. The robot gets absolute targets."""

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
    """Actions are delta actions: some values are relative to the pose in their own step. The robot gets delta commands.

    The targets of a chunk are the sums of its delta actions, starting at the state of its observation. A command is the
    difference between the target and the present pose. So if the robot starts in the middle of a chunk, the difference
    between the chunks is not added to the motion.

    Attributes:
        scale: Change of the state by one unit of an action.
        low: Smallest command, in units of an action.
        high: Largest command, in units of an action.
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
    """Create a motion from plain values.

    Args:
        values: A mapping with ``kind``, as ``Settings.motion``; None for actions without a known reference.

    Returns:
        The motion.

    Raises:
        ValueError: The kind is unknown, or a value does not fit.

    Example:
        >>> parse_motion({"kind": "relative", "action": [0, 1], "state": [0, 1]})
        Relative(action=(0, 1), state=(0, 1))
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
    """Stretch a chunk in time, so that the robot moves slower.

    Args:
        rows: Targets of the chunk, float32 [H, D]. Target k is due k + 1 steps after ``start``.
        start: Position before the chunk, [D]. For unknown values (NaN), the first target is used.
        speed: Fraction of the original speed, above 0 and at most 1.
        posed: Which values are positions, bool [D]. Positions are interpolated. Other values, such as a gripper
            command, change when the motion has reached their target.

    Returns:
        The targets, float32 [H / speed, D].
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
    """Interpolate between two commands, for robots that need commands at a higher rate than the control rate.

    The result depends only on the last command and the committed action, so later chunks cannot change it.

    Args:
        last: The last command, float32 [D]; None returns the action itself.
        row: The action of this control step, float32 [D]. It is reached at the end of the step.
        part: Fraction of the control step that has passed, 0 to 1.

    Returns:
        The command, float32 [D].
    """
    share = np.float32(part)
    # At the end of the step, return the action itself, because rounding in the sum below could exceed it.
    if last is None or share >= 1.0:
        return row
    return (last + (row - last) * share).astype(np.float32)
