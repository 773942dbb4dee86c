"""Open a leader arm by name: one of LeRobot's teleoperators, or a Python class with a method ``read``."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Mapping, Sequence

import numpy as np

from sinew_client.control.authority import LeaderError
from sinew_client.control.robots import lerobot_choice, lerobot_config
from sinew_client.modules import load_named

# While a leader with motors aligns itself with the robot, each control step moves it by this fraction of the distance.
SHARE = 0.1
# The largest speed of this motion, per second. The unit is LeRobot's: degrees, or -100 to 100 over a joint's range.
ALIGN_SPEED = 60.0


class LeRobotLeader:
    """A leader arm that is one of LeRobot's teleoperators. Its joints are in the order of the robot's commands.

    If the teleoperator supports feedback for all joints, its own motors align it with the robot. In each control step
    they move it by a tenth of the distance, at most 60 units per second (degrees, or -100 to 100 over a joint's range),
    because a person's hand may be on it. Then the motors are switched off. A person aligns any other teleoperator.

    Args:
        teleoperator: A teleoperator with ``action_features``, ``feedback_features``, ``get_action`` and
            ``send_feedback`` (LeRobot 0.4 to 0.6).
        names: Names of the numbers of a robot's command. The teleoperator must have the same joints.
        hz: Control steps per second.

    Raises:
        LeaderError: The teleoperator has other joints.
    """

    def __init__(self, teleoperator: Any, names: Sequence[str], hz: float = 30.0):
        self.teleoperator, self._names, self._most = teleoperator, list(names), ALIGN_SPEED / hz
        had = list(teleoperator.action_features)
        missing, strange = [n for n in names if n not in had], [n for n in had if n not in names]
        if missing or strange:
            raise LeaderError(
                f"--takeover: expected a leader with the joints {', '.join(names)}, got {', '.join(had)}"
            )
        if set(names) <= set(teleoperator.feedback_features or {}):
            self.align = self._align
        self._stiff = False

    def read(self) -> Any:
        """Return the leader's present joint positions, in the order of the robot's commands."""
        action = self.teleoperator.get_action()
        return [float(action[name]) for name in self._names]

    def free(self) -> None:
        """Switch the leader's motors off, so that a person can move the leader."""
        self._torque("disable_torque")
        self._stiff = False

    def close(self) -> None:
        # Ignore errors: the motors of an unplugged leader cannot be released.
        with contextlib.suppress(Exception):
            self.free()
        self.teleoperator.disconnect()

    def _align(self, position: np.ndarray) -> None:
        """Move the leader one step towards the robot's position, float [D]. Unknown numbers are NaN."""
        if not self._stiff:
            self._torque("enable_torque")
            self._stiff = True
        at = np.array(self.read(), np.float64)
        if not np.all(np.isfinite(at)):
            return  # the leader's position is unknown, so its motors must not move
        away = np.where(np.isnan(position), at, position) - at
        goal = at + np.clip(SHARE * away, -self._most, self._most)
        self.teleoperator.send_feedback(dict(zip(self._names, map(float, goal))))

    def _torque(self, method: str) -> None:
        if callable(change := getattr(self.teleoperator, method, None)):
            change()


def open_lerobot_leader(
    kind: str, options: Mapping[str, Any], names: Sequence[str], hz: float = 30.0
) -> LeRobotLeader:
    """Open and connect one of LeRobot's teleoperators.

    Args:
        kind: Type of the teleoperator, such as ``so101_leader``.
        options: Fields of the teleoperator's configuration.
        names: Names of the numbers of a robot's command.
        hz: Control steps per second.

    Returns:
        The connected leader.

    Raises:
        LeaderError: The teleoperator cannot be opened, or its joints differ from the robot's.
    """
    try:
        teleoperators = importlib.import_module("lerobot.teleoperators")
    except ImportError as error:
        raise LeaderError(
            f"--takeover lerobot:{kind} needs the package lerobot; install it in this environment ({error})"
        ) from error
    try:
        choice = lerobot_choice(teleoperators, teleoperators.TeleoperatorConfig, kind)
        config = lerobot_config(choice, options)
        leader = LeRobotLeader(teleoperators.make_teleoperator_from_config(config), names, hz)
        leader.teleoperator.connect()
    except (KeyError, TypeError, ValueError, OSError, ImportError) as error:
        raise LeaderError(f"--takeover lerobot:{kind}: {type(error).__name__}: {error}") from error
    return leader


def open_leader(text: str, options: Mapping[str, Any]) -> Any:
    """Create a leader from a Python class with a method ``read``.

    Args:
        text: ``module:Class``. The module is in the current folder or in an installed package.
        options: Keyword arguments of the class.

    Returns:
        The instance.

    Raises:
        LeaderError: The class cannot be created, or has no method ``read``.
    """
    factory = load_named(text, f"--takeover {text}")
    if not callable(factory):
        raise LeaderError(f"--takeover {text}: expected a class, got {type(factory).__name__}")
    try:
        leader = factory(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise LeaderError(f"--takeover {text}: {type(error).__name__}: {error}") from error
    if not callable(getattr(leader, "read", None)):
        raise LeaderError(f"--takeover {text}: expected a class with a method `read`; add this method")
    return leader
