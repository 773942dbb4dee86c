"""Limits of a robot, and the guard that no command passes without."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.given import named, read_text, shown

MAX_DIM = 8192  # numbers in a command
_NAMES = ("low", "high", "velocity", "acceleration")


class LimitsError(ClientError, ValueError):
    """A limit is missing, has the wrong length or contradicts another one; the message names the field."""


@dataclass(frozen=True)
class Limits:
    """Limits of each number of a command, in its own units, seconds and float64 [D]; infinite where there is no limit.

    low, high: range of a command. velocity: per second. acceleration: per second squared.
    when: "clip" sends the nearest allowed command and counts it, "hold" holds instead.
    """

    low: np.ndarray
    high: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray
    names: tuple[str, ...] = ()
    when: str = "clip"

    def __post_init__(self) -> None:
        if self.when not in ("clip", "hold"):
            raise LimitsError(f"limits.when: expected clip or hold, got {shown(self.when)}")
        if np.any(self.low > self.high):
            joint = int(np.argmax(self.low > self.high))
            raise LimitsError(
                f"limits.low: expected at most high, got {self.low[joint]} > {self.high[joint]} at {joint}"
            )
        for name in ("velocity", "acceleration"):
            if np.any(getattr(self, name) <= 0):
                raise LimitsError(f"limits.{name}: expected numbers above 0, got {getattr(self, name).min()}")

    @property
    def dim(self) -> int:
        return len(self.low)

    def name(self, joint: int) -> str:
        return self.names[joint] if joint < len(self.names) else str(joint)

    @classmethod
    def parse(cls, given: Mapping[str, Any], dim: int, where: str = "limits") -> Limits:
        """Return the limits of a mapping; a single number counts for every joint, None or a missing key is no limit.

        dim: numbers in a command. Raises :class:`LimitsError`.
        """
        if not 1 <= dim <= MAX_DIM:
            raise LimitsError(f"{where}: expected 1 to {MAX_DIM} numbers in a command, got {dim}")
        known = {*_NAMES, "names", "when"}
        for key in given:
            if key not in known:
                raise LimitsError(
                    "{}.{}: unknown; known are {}".format(where, named(key), ", ".join(sorted(known)))
                )
        vectors = [
            _vector(given.get(name), dim, f"{where}.{name}", -1 if name == "low" else 1) for name in _NAMES
        ]
        names = given.get("names") or ()
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise LimitsError(
                f"{where}.names: expected texts, one per number of a command, got {shown(names)}"
            )
        if names and len(names) != dim:
            raise LimitsError(f"{where}.names: expected {dim}, got {len(names)}")
        return cls(*vectors, tuple(names), given.get("when", "clip"))

    @classmethod
    def read(cls, path: Path, dim: int) -> Limits:
        """Return the limits of a ``.toml`` or ``.json`` file, from its table ``limits`` or its top level."""
        try:
            text = read_text(path)
            given = _toml(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise LimitsError(f"{path}: {error}") from error
        if isinstance(given, dict) and isinstance(given.get("limits"), dict):
            given = given["limits"]
        if not isinstance(given, dict):
            raise LimitsError(f"{path}: expected a table of limits, got {type(given).__name__}")
        return cls.parse(given, dim, str(path))

    @classmethod
    def from_metadata(cls, policy: Mapping[str, Any]) -> Limits | None:
        """Return the limits that a server states for its policy's actions (``action.limits``), or None.

        Raises :class:`LimitsError`.
        """
        action = policy.get("action") or {}
        given = action.get("limits") if isinstance(action, dict) else action
        if not given:
            return None
        if not isinstance(given, dict) or not isinstance(action.get("dim"), int):
            raise LimitsError(f"action: expected its dim and its limits as a table, got {shown(action)}")
        return cls.parse({"names": action.get("names"), **given}, action["dim"], "action.limits")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that :meth:`parse` takes; None where there is no limit."""
        vectors = {
            name: [None if math.isinf(x) else float(x) for x in getattr(self, name)] for name in _NAMES
        }
        return {**vectors, "names": list(self.names), "when": self.when}


def _vector(value: Any, dim: int, field: str, sign: int) -> np.ndarray:
    values: list[Any] = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * dim
    kinds = (int, float, np.integer, np.floating, type(None))
    if len(values) != dim:
        raise LimitsError(f"{field}: expected {dim} numbers, one per number of a command, got {len(values)}")
    try:
        if not all(isinstance(x, kinds) and not isinstance(x, bool) for x in values):
            raise TypeError("no number")
        vector = np.array([sign * math.inf if x is None else float(x) for x in values], np.float64)
    except (TypeError, OverflowError) as error:  # a whole number of 400 digits is no float
        raise LimitsError(f"{field}: expected numbers, got {shown(value)}") from error
    if np.isnan(vector).any():
        raise LimitsError(f"{field}: expected numbers, got NaN")
    return vector


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib  # Python before 3.11
        except ImportError:
            raise ValueError("TOML needs Python 3.11 or the package tomli; JSON works everywhere") from None
    return tomllib.loads(text)


@dataclass(frozen=True)
class Verdict:
    """The answer of a guard. row: what may be sent; None: hold. reason: why it holds.

    clipped: joints and limits that changed it, such as "elbow.velocity".
    """

    row: np.ndarray | None
    reason: str = ""
    clipped: tuple[str, ...] = ()


class Guard:
    """Checks every command against the limits, given the ones before it. Period: seconds between two commands.

    Limits are those of a position command: velocity is its change per second, acceleration the change of that. A
    robot near the end of its range is slowed early enough to stop there within its acceleration. Holding (repeating
    the last command) is always allowed, whatever the acceleration: a stop comes first. A range counts as commands can
    say it, its ends rounded to float32.
    """

    def __init__(self, limits: Limits | None, period: float):
        self.limits, self.period = limits, period
        if limits is not None:  # commands are float32: a limit of 0.1 is what 0.1 is in a command
            self._low, self._high = (
                end.astype(np.float32).astype(np.float64) for end in (limits.low, limits.high)
            )
        self._last: np.ndarray | None = None  # float64 [D]
        self._step = np.zeros(0)  # what the last command moved by

    def start(self, position: np.ndarray | None) -> None:
        """Begin where the robot is, standing still. None: unknown, the first command is taken as it comes."""
        fits = position is not None and (self.limits is None or np.shape(position) == (self.limits.dim,))
        known = fits and np.all(np.isfinite(position))
        self._last = np.array(position, np.float64) if known else None  # never where it was before
        self.held()

    def held(self) -> None:
        """Note that the robot repeats its last command."""
        self._step = np.zeros(0 if self._last is None else len(self._last))

    def check(self, row: np.ndarray) -> Verdict:
        """Return what may be sent in place of ``row`` float [D], and remember it as sent."""
        wanted = np.asarray(row, np.float64)
        if not np.all(np.isfinite(wanted)):
            return Verdict(None, "a command is not finite")
        if self.limits is None:
            return Verdict(row)
        if wanted.shape != (self.limits.dim,):
            return Verdict(
                None, f"a command has shape {list(wanted.shape)}, the limits have {self.limits.dim} numbers"
            )
        allowed, clipped = self._allowed(wanted, self.limits)
        if clipped and self.limits.when == "hold":
            return Verdict(None, "beyond {}".format(", ".join(clipped)), clipped)
        before = allowed if self._last is None else self._last
        self._step, self._last = allowed - before, allowed
        # A command that was not touched goes out bit for bit.
        return Verdict(row if not clipped else allowed.astype(np.float32), "", clipped)

    def _allowed(self, wanted: np.ndarray, limits: Limits) -> tuple[np.ndarray, tuple[str, ...]]:
        inside = np.clip(wanted, self._low, self._high)
        hits = [("range", inside != wanted)]
        if self._last is None:
            return inside, _named(hits, limits)
        fastest = limits.velocity * self.period
        push = limits.acceleration * self.period**2  # how much a step may differ from the one before
        move = inside - self._last
        slow = np.clip(move, -fastest, fastest)
        hits.append(("velocity", slow != move))
        smooth = np.clip(slow, self._step - push, self._step + push)
        smooth = np.minimum(smooth, np.maximum(_braking(self._high - self._last, push), self._step - push))
        smooth = np.maximum(smooth, np.minimum(-_braking(self._last - self._low, push), self._step + push))
        hits.append(("acceleration", smooth != slow))
        # Where nothing was limited the command is the one that was wanted, without the rounding of a detour.
        return np.where(smooth == move, inside, self._last + smooth), _named(hits, limits)


def _braking(distance: np.ndarray, push: np.ndarray) -> np.ndarray:
    """Return the largest step from which steps that shrink by ``push`` each end within ``distance``.

    Steps u, u - push, ... add up to at most (u + push / 2)^2 / (2 push).
    """
    with np.errstate(invalid="ignore"):
        step = np.sqrt(2.0 * push * np.maximum(distance, 0.0)) - push / 2
    endless = np.isinf(push) | np.isinf(distance)
    return np.where(endless, np.inf, np.maximum(np.where(np.isnan(step), 0.0, step), 0.0))


def _named(hits: list[tuple[str, np.ndarray]], limits: Limits) -> tuple[str, ...]:
    return tuple(f"{limits.name(int(joint))}.{kind}" for kind, mask in hits for joint in np.flatnonzero(mask))
