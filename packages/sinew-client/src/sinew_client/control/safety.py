"""The limits of a robot, and the guard that checks every command against the limits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from sinew_client.control.jerk import JerkLimit, StepBounds
from sinew_client.errors import ClientError, did_you_mean
from sinew_client.protocol import MAX_ROWS
from sinew_client.untrusted import named, read_json, read_toml, shown

MAX_DIM = 8192  # largest count of numbers in a command
RATES = ("velocity", "acceleration", "jerk", "jump")
_BOX = ("workspace_low", "workspace_high")
_NAMES = ("low", "high", *RATES, *_BOX, "still")
UNPLACED = "the robot's position is not known, so its limits of velocity and acceleration cannot be checked"
OUTSIDE = "the next command would leave the workspace"


class LimitsError(ClientError, ValueError):
    """A limit is missing, has the wrong length, or contradicts another limit. The message names the field."""


class RowsError(ClientError, ValueError):
    """The actions are not valid and must not be sent to a robot. The message states the reason."""

    code = "bad_chunk"


def checked_rows(
    given: Any, dim: int, most: int = MAX_ROWS, least: int = 1, what: str = "a chunk"
) -> np.ndarray:
    """Check the shape and the numbers of a chunk, and convert it to float32.

    Args:
        given: The actions.
        dim: Required number of values in an action (D); 0 allows any number.
        most: Largest number of actions.
        least: Smallest number of actions.
        what: Name of the chunk in error messages.

    Returns:
        The actions, float32 [H, D].

    Raises:
        RowsError: The actions are not finite real numbers of that shape.
    """
    try:
        rows = np.asarray(given)
    except Exception as error:
        raise RowsError(f"{what}: expected numbers, got {type(given).__name__}") from error
    if rows.dtype.kind not in "fiu":
        raise RowsError(f"{what}: expected real numbers, got {rows.dtype}")
    fits = rows.ndim == 2 and least <= len(rows) <= most and 0 < rows.shape[1] == (dim or rows.shape[1])
    if not fits:
        width = f"{dim} numbers" if dim else "numbers"
        raise RowsError(
            f"{what}: expected {least} to {most} actions of {width}, got shape {list(rows.shape)}"
        )
    # Numbers that are too large for float32 become infinite here. The check below rejects them.
    with np.errstate(over="ignore"):
        rows = np.asarray(rows, np.float32)
    if not np.all(np.isfinite(rows)):
        raise RowsError(f"{what} is not finite")
    return rows


@dataclass(frozen=True)
class Limits:
    """The limits of each value in a command, float64 [D], in robot units and seconds. Infinity means no limit.

    Attributes:
        low: Smallest command.
        high: Largest command.
        velocity: Largest change of a command per second.
        acceleration: Largest change of the velocity, per second squared.
        jerk: Largest change of the acceleration, per second cubed.
        jump: Largest difference between an action and the last command. If an action differs more, it is not sent, and
            the robot holds.
        workspace_low: Smallest position that a command may lead to, in the units of the state. It is for delta actions
            (:class:`~sinew_client.control.motion.Offsets`), where ``low`` limits only the size of a delta.
        workspace_high: Largest position that a command may lead to.
        still: The command of a robot that stands still, such as 0 for a velocity. NaN if the robot holds by repeating
            the last command.
        names: Name of each value; () if unknown.
        when: "clip" sends the nearest allowed command, and counts it. "hold" holds the robot instead.

    Raises:
        LimitsError: Limits contradict each other, or are not above 0 where they must be.

    Example:
        >>> limits = Limits.parse({"low": -3.1, "high": 3.1, "velocity": 1.5}, dim=6)
    """

    low: np.ndarray
    high: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray
    jerk: np.ndarray
    jump: np.ndarray
    workspace_low: np.ndarray
    workspace_high: np.ndarray
    still: np.ndarray
    names: tuple[str, ...] = ()
    when: str = "clip"

    def __post_init__(self) -> None:
        if self.when not in ("clip", "hold"):
            raise LimitsError(f"limits.when: expected clip or hold, got {shown(self.when)}")
        for first, last in (("low", "high"), _BOX):
            low, high = getattr(self, first), getattr(self, last)
            if np.any(low > high):
                joint = int(np.argmax(low > high))
                raise LimitsError(
                    f"limits.{first}: expected at most {last}, got {low[joint]} > {high[joint]} for value {joint}"
                )
        for name in RATES:
            if np.any(getattr(self, name) <= 0):
                raise LimitsError(f"limits.{name}: expected numbers above 0, got {getattr(self, name).min()}")
        if np.any((self.still < self.low) | (self.still > self.high)):
            raise LimitsError(f"limits.still: expected numbers from low to high, got {self.still.tolist()}")

    @property
    def dim(self) -> int:
        """Number of values in a command (D)."""
        return len(self.low)

    @functools.cached_property
    def paced(self) -> np.ndarray:
        """For each value of a command, True if it has a limit that depends on the last command (velocity, acceleration,
        jerk, jump), bool [D].
        """
        return np.any([np.isfinite(getattr(self, name)) for name in RATES], axis=0)

    @functools.cached_property
    def boxed(self) -> np.ndarray:
        """For each value of a command, True if its position is limited to a workspace, bool [D]."""
        return np.isfinite(self.workspace_low) | np.isfinite(self.workspace_high)

    def unpaced(self) -> list[str]:
        """Return the names of the values without any limit that depends on the last command (velocity, acceleration,
        jerk, jump).
        """
        return [self.name(at) for at in np.flatnonzero(~self.paced)]

    def name(self, joint: int) -> str:
        """Return the name of value number ``joint``, or its index as text if it has no name."""
        return self.names[joint] if joint < len(self.names) else str(joint)

    @classmethod
    def parse(cls, given: Mapping[str, Any], dim: int, where: str = "limits") -> Limits:
        """Create limits from plain values.

        Args:
            given: For each field of :class:`Limits`, a list of D numbers, or one number for all values. None or a
                missing key means no limit.
            dim: Number of values in a command (D).
            where: Prefix of error messages.

        Returns:
            The limits.

        Raises:
            LimitsError: A key is unknown, or a value does not fit.
        """
        if not 1 <= dim <= MAX_DIM:
            raise LimitsError(f"{where}: expected 1 to {MAX_DIM} values in a command, got {dim}")
        keys = {*_NAMES, "names", "when"}
        for key in given:
            if key not in keys:
                hint = did_you_mean(named(key), sorted(keys))
                raise LimitsError(
                    f"{where}.{named(key)}: expected one of {', '.join(sorted(keys))}, got an unknown key{hint}"
                )
        vectors = [
            _vector(given.get(name), dim, f"{where}.{name}", -1 if name.endswith("low") else 1)
            for name in _NAMES
        ]
        vectors[-1] = np.where(np.isinf(vectors[-1]), np.nan, vectors[-1])
        names = given.get("names") or ()
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise LimitsError(
                f"{where}.names: expected a list of texts, one for each value of a command, got {shown(names)}"
            )
        if names and len(names) != dim:
            raise LimitsError(f"{where}.names: expected {dim} names, got {len(names)}")
        return cls(*vectors, tuple(names), given.get("when", "clip"))

    @classmethod
    def read(cls, path: Path, dim: int) -> Limits:
        """Read limits from a ``.toml`` or ``.json`` file: from its table ``limits``, or else from its top level.

        Args:
            path: The file.
            dim: Number of values in a command (D).

        Returns:
            The limits.

        Raises:
            LimitsError: The file cannot be read, or its limits do not fit.
        """
        try:
            read = read_toml if path.suffix == ".toml" else read_json
            table = read(path, finite=False)  # infinity is allowed, and means that there is no limit
        except (OSError, ValueError) as error:
            raise LimitsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        if isinstance(table, dict) and isinstance(table.get("limits"), dict):
            table = table["limits"]
        if not isinstance(table, dict):
            raise LimitsError(f"{path}: expected a table of limits, got {type(table).__name__}")
        return cls.parse(table, dim, str(path))

    @classmethod
    def from_metadata(cls, policy: Mapping[str, Any]) -> Limits | None:
        """Read the limits of the actions in a policy's description (``action.limits``).

        Args:
            policy: The policy's description, ``metadata()["policy"]``.

        Returns:
            The limits; None if the description has no limits.

        Raises:
            LimitsError: The description is malformed.
        """
        action = policy.get("action") or {}
        table = action.get("limits") if isinstance(action, dict) else action
        if not table:
            return None
        if not isinstance(table, dict) or not isinstance(action.get("dim"), int):
            raise LimitsError(f"action: expected a number `dim` and a table `limits`, got {shown(action)}")
        return cls.parse({"names": action.get("names"), **table}, action["dim"], "action.limits")

    def ordered(self, names: Sequence[str], where: str = "limits") -> Limits:
        """Return the same limits with the values in another order.

        Args:
            names: Names of the values, in the new order. Limits without names already have this order.
            where: Prefix of error messages.

        Returns:
            The limits in the order of ``names``.

        Raises:
            LimitsError: The limits belong to other names.
        """
        if not self.names or not names or self.names == tuple(names):
            return self if self.names or not names else replace(self, names=tuple(names))
        if sorted(self.names) != sorted(names) or len(set(names)) < len(names):
            raise LimitsError(
                f"{where}.names: expected the policy's names {', '.join(names)}, got {', '.join(self.names)}"
            )
        places = [self.names.index(name) for name in names]
        vectors = {name: getattr(self, name)[places] for name in _NAMES}
        return replace(self, names=tuple(names), **vectors)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that :meth:`parse` accepts; None where there is no limit."""
        vectors = {
            name: [float(x) if math.isfinite(x) else None for x in getattr(self, name)] for name in _NAMES
        }
        return {**vectors, "names": list(self.names), "when": self.when}


def _vector(value: Any, dim: int, field: str, sign: int) -> np.ndarray:
    values: list[Any] = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * dim
    kinds = (int, float, np.integer, np.floating, type(None))
    if len(values) != dim:
        raise LimitsError(
            f"{field}: expected {dim} numbers, one for each value of a command, got {len(values)}"
        )
    try:
        if not all(isinstance(x, kinds) and not isinstance(x, bool) for x in values):
            raise TypeError("no number")
        vector = np.array([sign * math.inf if x is None else float(x) for x in values], np.float64)
    except (TypeError, OverflowError) as error:  # a number of 400 digits is too large for a float
        raise LimitsError(f"{field}: expected numbers, got {shown(value)}") from error
    if np.isnan(vector).any():
        raise LimitsError(f"{field}: expected numbers, got NaN")
    return vector


@dataclass(frozen=True)
class Verdict:
    """The result of a check by the guard.

    Attributes:
        row: The command that may be sent, float32 [D]; None if the robot must hold.
        reason: Why the robot holds.
        clipped: Joints and limits that changed the command, such as "elbow.velocity".
    """

    row: np.ndarray | None
    reason: str = ""
    clipped: tuple[str, ...] = ()


class Guard:
    """Checks every command against the limits and the previous commands.

    Velocity is the difference of two successive commands divided by the period. The first command is compared with the
    position of :meth:`start`. Until this position is known, no command may be sent. The guard ensures these rules:

    * Commands never exceed the range and the velocity, not even by a bit. The ends of the range are rounded to float32.
    * The acceleration may be exceeded by less than one float32 step, if there is no float32 number in between.
    * Near the end of its range, the robot slows down early enough to stop there within its acceleration.
    * A hold is always allowed, even beyond the acceleration, because a stop has priority.
    * A robot that stands outside its range may move back, but never further out.
    * With a jerk limit, commands approach the requested command as fast as allowed without overshoot, if that is still
    possible (:mod:`~sinew_client.control.jerk`). Acceleration and jerk may then be exceeded by the rounding of
    commands, at most 16 steps of float32.

    Args:
        limits: The limits; None checks only that commands are finite.
        period: Seconds between two commands.
        still: Command of a standing robot, float [D], for values without one in ``limits.still``.

    Attributes:
        before: The position before the last command, float32 [D], with NaN for unknown values.
    """

    def __init__(self, limits: Limits | None, period: float, still: np.ndarray | None = None):
        self.limits, self.period = limits, period
        if limits is not None:
            # Round the limits to float32 like the commands. Otherwise a command of exactly 0.1 could exceed a limit of
            # 0.1, because the float32 number nearest to 0.1 is a little larger than 0.1.
            self._low, self._high = (_sent(end) for end in (limits.low, limits.high))
            other = np.full(limits.dim, np.nan) if still is None else still
            self._still = _sent(np.where(np.isnan(limits.still), other, limits.still))
            self._jerky = np.isfinite(limits.jerk)
            bounds = StepBounds(
                self._low, self._high, limits.velocity * period, limits.acceleration * period**2,
                limits.jerk * period**3,
            )  # fmt: skip
            self._smooth = JerkLimit(bounds.take(self._jerky))
        # The last command, float64 [D] with values rounded to float32. NaN marks an unknown value.
        self._last = np.zeros(0)
        # The position before the last command, float32 [D]. Unknown numbers are NaN.
        self.before: np.ndarray | None = None
        self.start(None)

    @property
    def known(self) -> bool:
        """True if the robot's position is known for all values whose limits need it."""
        return self.limits is None or not np.any(np.isnan(self._last) & self.limits.paced)

    @property
    def here(self) -> np.ndarray | None:
        """The last command, float64 [D], with NaN for unknown values; None if there are no limits."""
        return None if self.limits is None else self._last

    def start(self, position: np.ndarray | None) -> None:
        """Set the position of a robot that stands still.

        Args:
            position: float [D], with NaN for unknown values; None if all values are unknown.
        """
        if self.limits is None:
            return
        fits = position is not None and np.shape(position) == (self.limits.dim,)
        at = _sent(np.asarray(position)) if fits else np.full(self.limits.dim, np.nan)
        # Do not keep the previous position for unknown numbers, because the robot may have been moved.
        self._last = np.where(np.isfinite(at), at, np.nan)
        self.held()

    def held(self) -> None:
        """Record that the robot holds: it repeats its last command, or gets the command ``still``."""
        if self.limits is not None:
            self._last = np.where(np.isnan(self._still), self._last, self._still)
            self.skipped()

    def skipped(self) -> None:
        """Record that no command was sent for a while, so the robot stands at its last command, with velocity 0."""
        self._step = np.zeros(len(self._last))  # how much the last command changed each of its numbers
        if self.limits is not None:
            self._smooth.rest(self._last[self._jerky])

    def check(
        self,
        row: np.ndarray,
        said: np.ndarray | None = None,
        inside: Callable[[np.ndarray], bool] = lambda _: True,
    ) -> Verdict:
        """Check a command. If a command may be sent, store it as the last command.

        Args:
            row: The requested command, float [D].
            said: The command before it was clipped to the workspace; None if it was not clipped. The limit ``jump``
                applies to this command too.
            inside: Function that returns True if a command stays in the workspace. Otherwise the robot must hold.

        Returns:
            The command that may be sent in place of ``row``, or the reason to hold.
        """
        with np.errstate(over="ignore"):
            row = np.asarray(row, np.float32)
        requested = row.astype(np.float64)
        if not np.all(np.isfinite(requested)):
            return Verdict(None, "the command is not finite")
        if self.limits is None:
            return Verdict(row)
        if requested.shape != (self.limits.dim,):
            return Verdict(
                None,
                f"a command has shape {list(requested.shape)}, the limits have {self.limits.dim} numbers",
            )
        if not self.known:
            return Verdict(None, UNPLACED)
        # Numbers with an unknown last command have only a range as a limit, which does not depend on the last command.
        last = np.where(np.isnan(self._last), requested, self._last)
        allowed, clipped = self._allowed(requested, last, self.limits)
        jumps = np.abs((requested if said is None else said) - last) > self.limits.jump
        # Check the clipped command too: it may move a robot that is far outside its range back by a large step.
        jumps |= np.abs(allowed - last) > self.limits.jump
        if jumps.any():
            names = _named([("jump", jumps)], self.limits)
            return Verdict(None, "too far from the last command: {}".format(", ".join(names)), names)
        if clipped and self.limits.when == "hold":
            return Verdict(None, "beyond {}".format(", ".join(clipped)), clipped)
        if not inside(allowed if clipped else row):
            return Verdict(None, OUTSIDE, clipped)
        self.before = self._last.astype(np.float32)
        self._last = allowed.astype(np.float64)
        self._step = self._last - last
        self._smooth.sent()
        # If no limit changed the command, send exactly the requested numbers.
        return Verdict(allowed if clipped else row, "", clipped)

    def _allowed(
        self, requested: np.ndarray, last: np.ndarray, limits: Limits
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Compute the nearest allowed command.

        Args:
            requested: The requested command, float64 [D].
            last: The last command, float64 [D].
            limits: The limits.

        Returns:
            The command, float32 [D], and the names of the limits that changed it, such as "elbow.velocity".
        """
        inside = np.clip(requested, self._low, self._high)
        move = inside - last
        fastest = limits.velocity * self.period
        push = limits.acceleration * self.period**2  # largest change from one step to the next
        # These are the largest steps up and down after which the robot can still brake before the end of its range. If
        # braking in time is no longer possible, the robot brakes as fast as its acceleration limit allows.
        up = np.maximum(_braking(self._high - last, push), self._step - push)
        up = np.minimum(np.minimum(fastest, self._step + push), up)
        down = np.minimum(-_braking(last - self._low, push), self._step + push)
        down = np.maximum(np.maximum(-fastest, self._step - push), down)
        slow, smooth = np.clip(move, -fastest, fastest), np.clip(move, down, up)
        hits = [("range", inside != requested), ("velocity", slow != move), ("acceleration", smooth != slow)]
        # For numbers that no limit changed, send the requested command itself, because last + step would be rounded.
        sent = np.where(smooth == move, inside, last + smooth).astype(np.float32)
        went = sent.astype(np.float64) - last
        sent = np.where((went > 0) & (went > up), np.nextafter(sent, np.float32(-np.inf)), sent)
        sent = np.where((went < 0) & (went < down), np.nextafter(sent, np.float32(np.inf)), sent)
        if self._jerky.any():
            sent, hits = self._smoothed(inside, last, sent, hits)
        ends = (np.minimum(self._low, last), np.maximum(self._high, last))
        return np.clip(sent, *(end.astype(np.float32) for end in ends)), _named(hits, limits)

    def _smoothed(
        self, inside: np.ndarray, last: np.ndarray, sent: np.ndarray, hits: list[tuple[str, np.ndarray]]
    ) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
        """Apply the jerk limits to the values that have one.

        Args:
            inside: The requested command inside the range, float64 [D].
            last: The last command, float64 [D].
            sent: The command without jerk limits, float32 [D].
            hits: Pairs of a kind of limit, and for each value True if this limit changed it, bool [D].

        Returns:
            The command, float32 [D], and the updated ``hits``.
        """
        jerky, requested = self._jerky, inside.astype(np.float32)
        sent = sent.copy()
        sent[jerky] = self._smooth.towards(inside[jerky], last[jerky])
        # If the requested number itself is sent, no limit has changed it, so remove it from the list of hits.
        reached = jerky & (sent == requested)
        hits = [hits[0], *((name, mask & ~reached) for name, mask in hits[1:])]
        named = np.any([mask for _, mask in hits], axis=0)
        return sent, [*hits, ("jerk", jerky & ~reached & ~named)]


def _sent(numbers: np.ndarray) -> np.ndarray:
    """Round numbers to float32, as commands are, and convert back to float64."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32).astype(np.float64)


def _braking(distance: np.ndarray, push: np.ndarray) -> np.ndarray:
    """Compute the largest step from which the robot can still brake within a distance.

    When it brakes, its steps are u, u - push, u - 2 push and so on. They add up to at most (u + push / 2)^2 / (2 push).

    Args:
        distance: Distance to the end of the range, [D].
        push: Largest change from one step to the next: acceleration * period^2, [D].

    Returns:
        The largest step u, float64 [D].
    """
    with np.errstate(invalid="ignore"):
        step = np.sqrt(2.0 * push * np.maximum(distance, 0.0)) - push / 2
    endless = np.isinf(push) | np.isinf(distance)
    return np.where(endless, np.inf, np.maximum(step, 0.0))


def _named(hits: list[tuple[str, np.ndarray]], limits: Limits) -> tuple[str, ...]:
    return tuple(f"{limits.name(int(joint))}.{kind}" for kind, mask in hits for joint in np.flatnonzero(mask))
