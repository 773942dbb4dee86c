"""The end of a run: the robot returns slowly to a rest pose. This needs neither the policy nor a server.

The rest pose is the robot's pose at the start of the run, or a named pose. The robot holds where it is if its state is
unknown, if a person commands it, or if the positions of its commands are unknown.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from sinew_client.control.authority import POLICY, RETURNING
from sinew_client.control.facts import RobotFacts
from sinew_client.control.interfaces import Stopped
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.listeners.shadow import ShadowListener
from sinew_client.control.motion import Motion, Offsets
from sinew_client.control.safety import Limits
from sinew_client.control.settings import Settings, SettingsError
from sinew_client.errors import did_you_mean
from sinew_client.untrusted import read_json, read_toml, shown

if TYPE_CHECKING:
    from sinew_client.control.controller import Command

logger = logging.getLogger(__name__)

HOLD, FIRST = "hold", "first"
SETTLE_S = 0.5  # the robot holds this many seconds before the return, so that the arm comes to rest
# The return ends after this many seconds without a valid state, and if the robot does not arrive at the pose in time.
PATIENCE_S = 1.0
# A return takes at least 3 s, as in LeRobot. A joint takes at least 10 s to cross its whole range.
LEAST_S, RANGE_S = 3.0, 10.0
FREE_S = 5.0  # shortest duration of a return in seconds, if a joint has neither a range nor a speed limit
MARGIN = 0.5  # the return uses at most this fraction of each limit of velocity, acceleration, jerk and jump
# The path is 10 u^3 - 15 u^4 + 6 u^5 for u from 0 to 1. These are the largest values of its first three derivatives.
PEAKS = (1.875, 5.7735, 60.0)
# All three numbers are fractions of the length of the path. The sensor is frozen if the state does not change by a bit
# while the commands cover 0.1 of the path. The arm is blocked if it is more than 0.25 behind its command: motors with
# a lag of 0.2 s are behind by at most 0.13, at the fastest point of the shortest return. The arm has arrived if it is
# within 0.1 of the pose.
FROZEN_SHARE, BEHIND_SHARE, ARRIVED_SHARE = 0.1, 0.25, 0.1
# Numbers with these names belong to a rotation. Linear interpolation between two rotations may turn the long way round.
_ROTATION = frozenset(
    (
        "roll",
        "pitch",
        "yaw",
        "rx",
        "ry",
        "rz",
        "qx",
        "qy",
        "qz",
        "qw",
        "droll",
        "dpitch",
        "dyaw",
        "drx",
        "dry",
        "drz",
    )
)
ENDED = "the run has ended"


def rest_of(
    chosen: Any, facts: RobotFacts, motion: Motion, limits: Limits | None, names: Sequence[str], dim: int
) -> tuple[str | list[float], tuple[str, ...]]:
    """Choose the pose to which the robot returns at the end of a run.

    Args:
        chosen: The user's choice: ``hold``, ``first``, the name of one of the robot's ``poses``, or a list with the
            values of a pose in the order of a command. None returns a physical robot to its first pose if its commands
            are joint positions, and holds any other robot.
        facts: The robot's facts.
        motion: The motion, which states what commands are relative to.
        limits: The limits of the run.
        names: Names of the values in a command.
        dim: Number of values in a command (D).

    Returns:
        :data:`HOLD`, :data:`FIRST`, or the values of a pose, and notes for the user before the robot moves.

    Raises:
        SettingsError: There is no such pose, the pose does not fit the command, or it is outside the limits.
    """
    if chosen is None:
        if not facts.physical:
            return HOLD, ()
        if why := _crooked(facts, motion, names, dim):
            return HOLD, (f"rest: the robot stays where it is at the end of the run, because {why}",)
        return FIRST, (
            "rest: at the end of the run the robot returns slowly to its first pose; --rest hold leaves it where it is",
        )
    if isinstance(chosen, str):
        if chosen in (HOLD, FIRST):
            return chosen, ()
        if chosen not in facts.poses:
            choices = [HOLD, FIRST, *facts.poses]
            raise SettingsError(
                f"rest: expected one of {', '.join(choices)}, got {chosen!r:.80}{did_you_mean(chosen, choices)}; name"
                " poses in the table [poses] of the limits file, or in the robot's `poses`"
            )
        chosen = facts.poses[chosen]
    pose = pose_of(chosen, names, dim)
    if limits is not None and dim:
        clipped = within(np.array(pose), motion, [limits])
        if beyond := [limits.name(int(at)) for at in np.flatnonzero(clipped != np.array(pose))]:
            raise SettingsError(
                f"rest: expected a pose inside the limits, got a pose that exceeds the limits of {', '.join(beyond)}"
            )
    return pose, ()


def _crooked(facts: RobotFacts, motion: Motion, names: Sequence[str], dim: int) -> str:
    """Return the reason why the robot does not return to its first pose by default; "" if it does.

    The robot returns by linear interpolation, so its commands must be positions that allow this.
    """
    if not dim or not np.any(motion.placed(dim)):
        return "it is not known whether its commands are positions; pass --motion to state this"
    if facts.between is None and _rotations(names):
        return "its commands contain a rotation, and a linear path between two rotations may turn the long way round"
    return ""


def pose_of(given: Any, names: Sequence[str], dim: int, where: str = "rest") -> list[float]:
    """Convert a pose to a list of values in the order of a command.

    Args:
        given: A list with one number per value of a command, or a mapping from the names of the values.
        names: Names of the values in a command.
        dim: Number of values in a command (D); 0 if it is unknown.
        where: Name of the pose in error messages.

    Returns:
        The values.

    Raises:
        SettingsError: The names or the number of values differ from those of a command, or a number is not finite.
    """
    if isinstance(given, Mapping):
        if not names or sorted(given) != sorted(names):
            expected = (
                ", ".join(names) or "a list of numbers, as neither the policy nor the robot names its joints"
            )
            raise SettingsError(
                f"{where}: expected {expected}, got {', '.join(map(str, given)) or 'nothing':.300}"
            )
        given = [given[name] for name in names]
    if not isinstance(given, (list, tuple, np.ndarray)) or (dim and len(given) != dim):
        expected = f"{dim or 'a list of'} numbers, one for each value of a command"
        raise SettingsError(f"{where}: expected {expected}, got {shown(given)}")
    for value in given:
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not number or not abs(value) < 1e30:
            raise SettingsError(f"{where}: expected finite numbers, got {shown(value)}")
    return [float(value) for value in given]


def read_poses(path: Path) -> Mapping[str, Any]:
    """Read the rest poses in the table ``poses`` of a limits file.

    Args:
        path: The ``.toml`` or ``.json`` file.

    Returns:
        The poses by name; {} if the file has no such table.

    Raises:
        SettingsError: The file cannot be read, or ``poses`` is not a table.
    """
    read = read_toml if path.suffix == ".toml" else read_json
    try:
        poses = read(path, finite=False).get("poses", {})
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(poses, dict):
        raise SettingsError(f"{path}: poses: expected a table of poses by name, got {shown(poses)}")
    return poses


def within(pose: np.ndarray, motion: Motion, limits: Sequence[Limits]) -> np.ndarray:
    """Clip a pose [D] to the ranges and the workspaces of all ``limits``. Return the clipped pose, float64 [D]."""
    inside = np.array(pose, np.float64)
    placed = motion.placed(len(pose))
    for each in limits:
        ranged = np.clip(inside, each.low, each.high)
        inside = np.clip(np.where(placed, ranged, inside), each.workspace_low, each.workspace_high)
    return inside


def _rotations(names: Sequence[str]) -> bool:
    """Return True if one of the names belongs to a rotation, such as "ee.yaw"."""
    return any(name.lower().replace("/", ".").replace(" ", ".").split(".")[-1] in _ROTATION for name in names)


class RestPose(LoopListener):
    """Returns the robot to its rest pose after a run. It belongs to one loop, and listens during the whole run.

    Args:
        settings: The run's settings, with ``rest`` resolved (:func:`rest_of`).
        dim: Number of values in a command (D).
        facts: The robot's facts.
        also: Further limits for the return, such as the policy's own limits in addition to the user's limits.

    Attributes:
        outcome: ``{"returned": bool, "text": ..., "seconds": ...}`` after the end of a run, {} before.
    """

    def __init__(self, settings: Settings, dim: int, facts: RobotFacts, also: Limits | None = None):
        self.rest, self.settings, self.facts = settings.rest, settings, facts
        own = None if settings.limits is None or not dim else Limits.parse(settings.limits, dim)
        self._limits = [each for each in (own, also) if each is not None]
        self.outcome: dict[str, Any] = {}
        self._first: np.ndarray | None = None  # the first observed state of the run
        self._row: np.ndarray | None = None  # the newest command
        # `_state` is the newest state. `_swept` has the smallest and the largest target that were sent since `_state`
        # last changed, each [D].
        self._state: np.ndarray | None = None
        self._swept: tuple[np.ndarray, np.ndarray] | None = None
        self._goes = False
        self._begin()

    def _begin(self) -> None:
        # These are the seconds in which the robot has held at the start, had no state, and was near the pose but had
        # not arrived. `_part` is the fraction of the path's time that has passed.
        self._settled = self._blind = self._late = self._part = 0.0
        self._start = self._goal = self._way = np.zeros(0)
        self._slack = self._seconds = self._taken = 0.0
        self._moving = self._short = False

    @property
    def observes(self) -> bool:  # type: ignore[override]
        return self._goes

    def observed(self, step: int, observation: Mapping[str, Any]) -> None:
        state = self.loop.observer.state.copy()
        if self._state is None or not np.array_equal(self._state, state):
            self._swept = None
        self._state = state
        if self._first is None:
            self._first = state

    def command(self, command: Command) -> None:
        if command.row is None:
            return
        self._row = command.row
        motion, state = self.loop.controller.motion, self.loop.observer.state
        if not self.loop.controller.needs_state or state is not None:
            target = np.asarray(motion.reached(command.row, state), np.float64)
            low, high = self._swept or (target, target)
            self._swept = np.minimum(low, target), np.maximum(high, target)
        if command.by == RETURNING:
            self._part = min(1.0, self._part + self.settings.period / self._seconds)

    def report(self) -> dict[str, Any]:
        return {"rest": self.outcome}

    def go(self) -> None:
        """Return the robot to its rest pose, or hold it where it is. Call this after the run, in the loop's thread.

        A second call of :meth:`Loop.stop` ends the return at once. Exceptions of the robot end the return and are
        logged. This method does not raise them.
        """
        loop = self.loop
        if self._row is None:  # the robot has not moved, because it never got a command
            return
        self.outcome = {}
        if reason := self._stays():
            self._ends(reason)
            return
        logger.warning(
            "the robot returns to its %s; press q, or Ctrl-C a second time, to stop it at once", self._name()
        )
        loop.source.cancel()
        self._begin()
        self._goes = loop.returning = True
        try:
            loop.controller.returns(loop.next_step)
            loop.play(lambda: self._goes)
        except Stopped as end:
            self._ends(f"the robot has ended the run: {end}")
        except Exception as error:
            logger.exception("the robot failed on its way to its %s", self._name())
            self._ends(f"the robot failed: {type(error).__name__}: {error!s:.200}")
        finally:
            # A signal without a handler (KeyboardInterrupt) can end the return before the pose is reached.
            if self._goes:
                self._ends("it was stopped")
            loop.returning = False
            if loop.controller.driver == RETURNING:
                loop.controller.hand_back(loop.next_step)

    def _name(self) -> str:
        return "first pose" if self.rest == FIRST else "rest pose"

    def _stays(self) -> str:
        """Return the reason why the robot must not return; "" if it may return."""
        loop = self.loop
        if self.rest in (None, HOLD):
            return "rest is hold"
        if loop.at_once:
            return "it was stopped at once"
        if loop.controller.paused:
            return "the run is paused, so a person may be at the robot"
        if loop.controller.driver != POLICY or isinstance(loop.robot, ShadowListener):
            return "a person commands it"
        return ""

    def before(self, step: int, observation: Mapping[str, Any] | None) -> None:
        if not self._goes:
            return
        loop, controller = self.loop, self.loop.controller
        if loop.at_once:
            self._ends("it was stopped at once")
        elif controller.paused:
            self._ends("the run was paused")
        elif controller.driver != RETURNING:
            self._ends("a person or another episode has ended the return")
        if not self._goes:
            return
        if observation is None:
            self._blind += self.settings.period
            if self._blind > PATIENCE_S:
                self._ends(f"its state is not known: {loop.observer.fault}")
            controller.led(step, None, loop.observer.fault)
            return
        self._blind = 0.0
        if not self._moving:
            self._settled += self.settings.period
            if self._settled < SETTLE_S:
                controller.led(step, None, ENDED)
                return
            if reason := self._plans():
                self._ends(reason)
                controller.led(step, None, ENDED)
                return
        if reason := self._lags():
            self._ends(reason)
        controller.led(step, self._next() if self._goes else None, ENDED)

    def _pose(self, state: np.ndarray | None = None) -> np.ndarray:
        """Return the robot's position, float64 [D], from ``state`` or, if it is None, from the newest state."""
        controller = self.loop.controller
        seen = self.loop.observer.state if state is None else state
        return np.asarray(controller.motion.pose(seen, controller.dim), np.float64)

    def _plans(self) -> str:
        """Plan the path to the rest pose. Return the reason if there is no safe path; "" after a success."""
        loop, controller = self.loop, self.loop.controller
        dim, motion = controller.dim, controller.motion
        assert self._row is not None
        posed = motion.posed(dim)
        if not posed.any():
            return "the target of its commands is not known; pass --motion absolute, relative or offsets"
        here = self._pose()
        # Start the path at the last command and not at the observed position. A motor under load is a little below its
        # command, so the arm would sag if the path began at the observed position.
        sent = loop.last_row if motion.placed(dim).any() else None
        start = np.where(posed, here if sent is None else np.asarray(sent, np.float64), self._row)
        assert self._first is not None  # the robot was observed before its first command
        goal = self._pose(self._first) if self.rest == FIRST else np.asarray(self.rest, np.float64)
        if goal.shape != start.shape or not np.all(np.isfinite(goal[posed])):
            return "its first pose is not known"
        if not (np.all(np.isfinite(start)) and np.all(np.isfinite(here[posed]))):
            return "its position cannot be computed from its state"
        goal = np.where(posed, goal, start)
        inside = within(goal, motion, self._limits)
        self._short = bool(np.any(inside != goal))
        self._start, self._way = start, inside - start
        length = float(np.linalg.norm(self._way))
        self._slack = float(np.linalg.norm((here - start)[posed]))
        if self._slack > 0.5 * length:
            return "its distance from the last command is more than half of the path"
        self._seconds = self._duration(np.abs(self._way), motion)
        self._goal, self._moving = inside, True
        return ""

    def _duration(self, way: np.ndarray, motion: Motion) -> float:
        """Compute the duration of the return, so that it uses at most half of each limit.

        Args:
            way: Absolute change of each value on the path, float64 [D].
            motion: The motion, which states what commands are relative to.

        Returns:
            The duration in seconds; at least 3.
        """
        hz = self.settings.hz
        unlimited = np.full(len(way), np.inf)
        velocity, acceleration, jerk, span = unlimited, unlimited, unlimited, unlimited
        offsets = isinstance(motion, Offsets)
        for each in self._limits:
            if offsets:
                unit = motion.scale * hz  # type: ignore[attr-defined]
                reach = np.minimum(np.abs(each.low), np.abs(each.high))
                own = (unit * reach, unit * each.velocity, unit * each.acceleration)
                span = np.minimum(span, each.workspace_high - each.workspace_low)
            else:
                own = (np.minimum(each.velocity, each.jump * hz), each.acceleration, each.jerk)
                span = np.minimum(span, each.high - each.low)
            velocity, acceleration, jerk = (
                np.minimum(old, new) for old, new in zip((velocity, acceleration, jerk), own)
            )
        if offsets:
            reach = min(abs(motion.low), abs(motion.high))  # type: ignore[attr-defined]
            velocity = np.minimum(velocity, motion.scale * hz * reach)  # type: ignore[attr-defined]
        moves = way > 0
        seconds = [LEAST_S]
        with np.errstate(divide="ignore", invalid="ignore"):
            for limit, peak, root in (
                (velocity, PEAKS[0], 1),
                (acceleration, PEAKS[1], 2),
                (jerk, PEAKS[2], 3),
            ):
                needed = (peak * way / (MARGIN * limit)) ** (1.0 / root)
                seconds += [float(each) for each in needed[moves & np.isfinite(limit)]]
            seconds += [float(each) for each in (RANGE_S * way / span)[moves & np.isfinite(span)]]
        if np.any(moves & ~np.isfinite(span) & ~np.isfinite(velocity)):
            seconds.append(FREE_S)
        return max(seconds)

    def _lags(self) -> str:
        """Check that the robot follows the path to the rest pose. Return the reason why the return must stop; "" if it
        may continue.

        If the robot has arrived at the rest pose, this method ends the return.
        """
        posed = self.loop.controller.motion.posed(len(self._way))
        length = float(np.linalg.norm(self._way))
        self._taken += self.settings.period
        sent = self._sent()
        apart = float(np.linalg.norm((self._pose() - sent)[posed]))
        if self._swept is not None and length > 0:
            low, high = self._swept
            if float(np.linalg.norm((high - low)[posed])) > FROZEN_SHARE * length:
                return "its state stays the same while the commands move: the sensor may be frozen"
        if apart > BEHIND_SHARE * length + self._slack:
            return "it does not follow the commands"
        if self._taken > 3.0 * self._seconds + 5.0:
            return "the limits do not let it arrive in time"
        there = float(np.linalg.norm((self._goal - sent)[posed])) <= 1e-3 * length
        if self._part < 1.0 or not there:
            return ""
        if float(np.linalg.norm((self._goal - self._pose())[posed])) <= ARRIVED_SHARE * length + self._slack:
            reason = "its rest pose is beyond the limits" if self._short else ""
            self._ends(reason)
            return ""
        self._late += self.settings.period
        return "it did not reach its rest pose in time" if self._late > PATIENCE_S else ""

    def _sent(self) -> np.ndarray:
        """Return the last target that was sent to the robot, float64 [D]."""
        loop = self.loop
        if loop.last_row is None or not loop.controller.motion.placed(len(self._way)).any():
            return self._at(self._part)
        return np.asarray(loop.last_row, np.float64)

    def _at(self, part: float) -> np.ndarray:
        """Return the target at the fraction ``part`` (0 to 1) of the path's time, float64 [D].

        Speed is 0 at both ends.
        """
        share = part**3 * (10.0 - 15.0 * part + 6.0 * part**2)
        if self.facts.between is not None and share < 1.0:
            return np.asarray(self.facts.between(self._start, self._goal, share), np.float64)
        return self._start + share * self._way if share < 1.0 else self._goal

    def _next(self) -> np.ndarray:
        """Return the command of this control step, float32 [D]."""
        target = self._at(min(1.0, self._part + self.settings.period / self._seconds)).astype(np.float32)
        return self.loop.controller.motion.command(target, self.loop.observer.state)

    def _ends(self, reason: str) -> None:
        """End the return, and log its outcome. ``reason`` states why the robot did not arrive; "" if it has arrived."""
        self._goes = False
        seconds = round(self._taken, 3)
        if reason:
            text = f"the robot holds where it is: {reason}"
        else:
            text = f"the robot has returned to its {self._name()} in {seconds:.1f} s"
            if self.facts.rested is not None:
                self.facts.rested()
        self.outcome = {"returned": not reason, "text": text, "seconds": seconds}
        if self.rest not in (None, HOLD):
            logger.log(logging.WARNING if reason else logging.INFO, "%s", text)
