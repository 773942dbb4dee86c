"""Open a leader by name: one of LeRobot's teleoperators, or a class with a method ``read``."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Mapping, Sequence

import numpy as np

from sinew_client.control.authority import LeaderError
from sinew_client.control.robots import lerobot_choice, lerobot_config
from sinew_client.modules import load_named

SHARE = 0.1  # share of the way to the robot that a leader with motors moves in each control step
ALIGN_SPEED = (
    60.0  # units per second at which it goes at most: degrees, or hundredths of half a joint's range
)


class LeRobotLeader:
    """One of LeRobot's teleoperators, with its joints in the order of a robot's commands.

    A teleoperator whose feedback has all joints is moved to the robot's position by its own motors: a tenth of the
    way in each control step, at most 60 units per second (degrees, or hundredths of half a joint's range), because a
    hand may be on it. Then it is released. The human moves any other one.

    Args:
        teleoperator: It has ``action_features``, ``feedback_features``, ``get_action`` and ``send_feedback`` (LeRobot
            0.4 to 0.6).
        names: Names of the robot's commands. A teleoperator with other joints is rejected.
        hz: Control steps per second.
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
        given = self.teleoperator.get_action()
        return [float(given[name]) for name in self._names]

    def free(self) -> None:
        """Let the person move it."""
        self._torque("disable_torque")
        self._stiff = False

    def close(self) -> None:
        with contextlib.suppress(Exception):  # an unplugged leader cannot be released
            self.free()
        self.teleoperator.disconnect()

    def _align(self, position: np.ndarray) -> None:
        if not self._stiff:
            self._torque("enable_torque")
            self._stiff = True
        at = np.array(self.read(), np.float64)
        if not np.all(np.isfinite(at)):
            return  # its motors are sent nowhere from a place that is not known
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
        kind: Its type, such as ``so101_leader``.
        options: Fields of its configuration.
        names: Names of the robot's commands.
        hz: Control steps per second.

    Raises:
        LeaderError: It cannot be opened, or does not fit.
    """
    try:
        teleoperators = importlib.import_module("lerobot.teleoperators")
    except ImportError as error:
        raise LeaderError(
            f"--takeover lerobot:{kind} needs the package lerobot in this environment ({error})"
        ) from error
    try:
        made = lerobot_choice(teleoperators, teleoperators.TeleoperatorConfig, kind)
        config = lerobot_config(made, options)
        leader = LeRobotLeader(teleoperators.make_teleoperator_from_config(config), names, hz)
        leader.teleoperator.connect()
    except (KeyError, TypeError, ValueError, OSError, ImportError) as error:
        raise LeaderError(f"--takeover lerobot:{kind}: {type(error).__name__}: {error}") from error
    return leader


def open_leader(text: str, options: Mapping[str, Any]) -> Any:
    """Return an instance of ``module:Class``, from the current folder or an installed package, with a method
    ``read``.
    """
    made = load_named(text, f"--takeover {text}")
    if not callable(made):
        raise LeaderError(f"--takeover {text}: expected a class, got {type(made).__name__}")
    try:
        leader = made(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise LeaderError(f"--takeover {text}: {type(error).__name__}: {error}") from error
    if not callable(getattr(leader, "read", None)):
        raise LeaderError(f"--takeover {text}: expected a class with a method read, got one without")
    return leader
