"""Optional facts about a robot, read in one place.

A robot has three methods (:class:`~sinew_client.control.interfaces.Robot`). Everything else about it is optional and
is read here, so that no other module has to look for attributes of a robot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Protocol

import numpy as np


class Episodic(Protocol):
    """A robot in a world with episodes, such as a simulated task.

    Attributes:
        finished: Number of episodes that have ended.
        successes: Number of these that succeeded.
        episodes: Number of episodes after which the robot ends the run; None for no end.
        on_episode: Called with a reason and an instruction when a new episode has begun.
    """

    finished: int
    successes: int
    episodes: int | None
    on_episode: Callable[[str, str], None] | None


class Scenes(Protocol):
    """A robot that sets up the scene of a trial and judges it.

    Attributes:
        success: Outcome of the present trial; None while it runs.
    """

    success: bool | None

    def set_up(self, seed: int) -> None:
        """Set up the scene of a seed and begin the trial."""


def _no_task() -> str:
    return ""


def _no_need() -> bool:
    return False


def _no_verdict() -> None:
    return None


@dataclass(frozen=True)
class RobotFacts:
    """Optional facts about a robot. A robot may return them from a method ``facts()``.

    For a robot without that method, its attributes of the same names are read (``task`` as a text, ``arm_points`` for
    ``points``, ``control_hz`` for ``hz``).

    Attributes:
        joints: Names of the numbers of its state and of a command: one list for both, or a mapping with "state" and
            "action". None if it has no names.
        joint_unit: Unit of its joints, such as "rad" or "deg"; "" if it does not state one.
        motion: Reference of its commands, as ``Settings.motion``; None if it does not state it.
        hz: Rate in Hz at which it has to be commanded, such as that of a simulation; None for any.
        physical: False if nothing can break: a simulation, or no hardware at all.
        bounds_speed: True if it limits the speed of its joints itself.
        needs_state: Returns True if its next command counts from the position in the same control step, so that it
            holds without an observation. Robots with poses for commands do.
        task: Returns its own instruction at present, "" for none.
        concurrent_hold: True if ``hold`` may be called from another thread while another method blocks.
        sense: Returns the state alone, float [S], if that is faster than ``observe``; None if it cannot.
        points: Returns the last known points of its arm, float [N, 3], metres; None if they are not known.
        episodes: The robot as one with episodes; None if it has none.
        scenes: The robot as one that sets up and judges trials; None if it does not.
        success: Returns the outcome of the present trial, if the robot judges it: True, False, or None meanwhile.
        leader: Opens the scripted expert of its task as a leader (``sinew run --takeover expert``), with options as
            keywords. None if it has none.
        close: Disconnects it; None if there is nothing to close.
        poses: Rest poses by name: the numbers of a command in its order, or a mapping from their names.
        rested: Called when it has returned to its rest pose, so that closing it may switch its motors off; None if it
            does not matter.
        between: Returns the pose at a share (0 to 1) of the way from one command to another, for a robot whose numbers
            have no straight line between them; None for a straight line.
    """

    joints: Any = None
    joint_unit: str = ""
    motion: Mapping[str, Any] | None = None
    hz: float | None = None
    physical: bool = True
    bounds_speed: bool = False
    needs_state: Callable[[], bool] = _no_need
    task: Callable[[], str] = _no_task
    concurrent_hold: bool = True
    sense: Callable[[], Any] | None = None
    points: Callable[[], Any] | None = None
    episodes: Episodic | None = None
    scenes: Scenes | None = None
    success: Callable[[], Any] = _no_verdict
    leader: Callable[..., Any] | None = None
    close: Callable[[], None] | None = None
    poses: Mapping[str, Any] = field(default_factory=dict)
    rested: Callable[[], None] | None = None
    between: Callable[[Any, Any, float], Any] | None = None

    def names(self, part: str) -> list[str]:
        """Return the names of the numbers of ``part``, "state" or "action"; [] if the robot has no names."""
        own = self.joints or ()
        return list(own[part] if isinstance(own, Mapping) else own)

    @property
    def counts(self) -> tuple[int | None, int | None]:
        """Number of successful and of finished episodes. None for a count that is not a whole number."""
        if self.episodes is None:
            return None, None
        # Successes are read first: an episode ends before it is counted as a success.
        successes, finished = self.episodes.successes, self.episodes.finished
        return _whole(successes), _whole(finished)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, np.integer)) else None


def facts_of(robot: Any) -> RobotFacts:
    """Return the facts of a robot.

    Args:
        robot: A robot, or a wrapper around one that has the method ``facts``.

    Returns:
        Its facts. Facts that it does not state have the defaults of :class:`RobotFacts`.
    """
    own = getattr(robot, "facts", None)
    if callable(own) and isinstance(stated := own(), RobotFacts):
        return stated

    def method(name: str) -> Callable[..., Any] | None:
        value = getattr(robot, name, None)
        return value if callable(value) else None

    episodic = hasattr(robot, "finished")
    return RobotFacts(
        joints=getattr(robot, "joints", None),
        joint_unit=str(getattr(robot, "joint_unit", "") or ""),
        motion=getattr(robot, "motion", None),
        needs_state=lambda: bool(getattr(robot, "needs_state", False)),
        task=lambda: str(getattr(robot, "task", "") or ""),
        hz=getattr(robot, "control_hz", None),
        physical=bool(getattr(robot, "physical", True)),
        concurrent_hold=bool(getattr(robot, "concurrent_hold", True)),
        sense=method("sense"),
        points=method("arm_points"),
        episodes=robot if episodic else None,
        scenes=robot if method("set_up") and hasattr(robot, "success") else None,
        success=lambda: getattr(robot, "success", None),
        close=method("close"),
        poses=poses if isinstance(poses := getattr(robot, "poses", None), Mapping) else {},
        rested=method("rested"),
    )
