"""Optional facts about a robot, such as its joint names and its rest poses.

A robot must have three methods (:class:`~sinew_client.control.interfaces.Robot`). All other attributes are optional.
:func:`facts_of` reads them in one place, so that no other module has to look for attributes of a robot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Protocol

import numpy as np


class Episodic(Protocol):
    """The interface of a robot in an environment with episodes, such as a simulated task.

    Attributes:
        finished: Number of episodes that have ended.
        successes: Number of ended episodes that succeeded.
        episodes: Number of episodes after which the robot ends the run; None never ends it.
        on_episode: Function that the robot calls when a new episode has begun, with a reason and an instruction.
    """

    finished: int
    successes: int
    episodes: int | None
    on_episode: Callable[[str, str], None] | None


class Scenes(Protocol):
    """The interface of a robot that sets up the scene of a trial and decides whether the trial succeeded.

    Attributes:
        success: Outcome of the present trial; None while it runs.
    """

    success: bool | None

    def set_up(self, seed: int) -> None:
        """Set up the scene that belongs to ``seed``, and begin the trial."""


def _no_task() -> str:
    return ""


def _no_need() -> bool:
    return False


def _no_verdict() -> None:
    return None


@dataclass(frozen=True)
class RobotFacts:
    """Optional facts about a robot. A robot may return them from a method ``facts()``.

    If the robot has no such method, :func:`facts_of` reads its attributes of the same names. Three names differ: it
    reads ``task`` as a text, ``arm_points`` as ``points`` and ``control_hz`` as ``hz``.

    Attributes:
        joints: Names of the values in the state and in a command: one list for both, or a mapping with "state" and
            "action". None if the robot has no names.
        joint_unit: Unit of the joints, such as "rad" or "deg"; "" if the robot does not state a unit.
        motion: What commands are relative to, as ``Settings.motion``; None if the robot does not state it.
        hz: Required rate of commands in Hz, such as the rate of a simulation; None allows any rate.
        physical: False if the robot is simulated or has no hardware, so that it cannot break anything.
        bounds_speed: True if the robot limits the speed of its joints itself.
        needs_state: Function that returns True if the next command depends on the position in the same control step.
            Without a valid observation, the robot then holds. Robots whose commands are poses need this.
        task: Function that returns the robot's own present instruction; "" if it has none.
        concurrent_hold: True if ``hold`` may be called from another thread while another method blocks.
        sense: Function that returns only the state, float [S], faster than ``observe``; None without such a function.
        points: Function that returns the last known points of the arm, float [N, 3], in metres; None without one.
        episodes: The robot's interface for episodes; None without episodes.
        scenes: The robot's interface to set up and judge trials; None without one.
        success: Function that returns the outcome of the present trial if the robot judges it: True, False, or None
            while the trial runs.
        leader: Function that opens the scripted expert of the robot's task as a leader (``sinew run --takeover
            expert``). It takes options as keywords. None without an expert.
        close: Function that disconnects the robot; None if there is nothing to close.
        poses: Rest poses by name. A pose is a list with one number per value of a command, or a mapping from the names
            of these values.
        rested: Function that the loop calls when the robot is at its rest pose, so that ``close`` may switch the motors
            off; None without one.
        between: Function (start, goal, share) that interpolates between two commands, with a share from 0 to 1. It is
            for robots whose values cannot be interpolated linearly, such as rotations. None interpolates linearly.
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
        """Return the names of the values in the "state" or the "action"; [] if the robot has no names."""
        own = self.joints or ()
        return list(own[part] if isinstance(own, Mapping) else own)

    @property
    def counts(self) -> tuple[int | None, int | None]:
        """The number of successful episodes, and the number of finished episodes; None for an unknown count."""
        if self.episodes is None:
            return None, None
        # Another thread may count an episode between the two reads. A robot counts it as finished first and as a
        # success afterwards. Read the successes first, so that they never exceed the finished episodes.
        successes, finished = self.episodes.successes, self.episodes.finished
        return _whole(successes), _whole(finished)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, np.integer)) else None


def missing_methods(robot: Any) -> list[str]:
    """Return the names of the required methods that a robot lacks."""
    return [name for name in ("observe", "act", "hold") if not callable(getattr(robot, name, None))]


def facts_of(robot: Any) -> RobotFacts:
    """Collect the optional facts about a robot.

    Args:
        robot: A robot, or a wrapper around one that has the method ``facts``.

    Returns:
        The robot's facts. Facts that the robot does not state have the defaults of :class:`RobotFacts`.
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
