"""What published policies and simulators disagree about: orientations, grippers, frames upside down. numpy alone.

Quaternions are (x, y, z, w) unless a name says otherwise. Every function takes and gives plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Unit quaternion [4] -> axis times angle [3], the angle in [0, 2 pi].

    As robosuite does it (``transform_utils.quat2axisangle``), and so as LIBERO's demonstrations have it: w is
    clipped, and q and -q are *not* the same: a negative w gives the long way round.
    """
    x, y, z, w = np.asarray(quaternion, np.float64)
    w = min(1.0, max(-1.0, w))
    length = np.sqrt(1.0 - w * w)
    if length < 1e-10:
        return np.zeros(3)
    return np.array([x, y, z]) * (2.0 * np.arccos(w) / length)


def matrix(quaternion: np.ndarray) -> np.ndarray:
    """Unit quaternion [4] -> rotation matrix [3, 3]."""
    x, y, z, w = np.asarray(quaternion, np.float64)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def roll_pitch_yaw(rotation: np.ndarray) -> np.ndarray:
    """Rotation matrix [3, 3] = Rz(yaw) Ry(pitch) Rx(roll) -> [3]; roll is 0 where pitch is a right angle."""
    pitch = np.arctan2(-rotation[2, 0], np.hypot(rotation[0, 0], rotation[1, 0]))
    if np.hypot(rotation[0, 0], rotation[1, 0]) < 1e-9:
        return np.array([0.0, pitch, np.arctan2(-rotation[0, 1], rotation[1, 1])])
    return np.array(
        [
            np.arctan2(rotation[2, 1], rotation[2, 2]),
            pitch,
            np.arctan2(rotation[1, 0], rotation[0, 0]),
        ]
    )


def axis_angle_of_rpy(angles: np.ndarray) -> np.ndarray:
    """Roll, pitch, yaw [3] -> axis times angle [3]: SimplerEnv takes the latter, Bridge policies give the former."""
    (cr, cp, cy), (sr, sp, sy) = np.cos(np.asarray(angles) / 2), np.sin(np.asarray(angles) / 2)
    return axis_angle(
        np.array(
            [
                sr * cp * cy - cr * sp * sy,
                cr * sp * cy + sr * cp * sy,
                cr * cp * sy - sr * sp * cy,
                cr * cp * cy + sr * sp * sy,
            ]
        )
    )


# At rest, the gripper of BridgeData's WidowX points down, and the gripper of SimplerEnv's WidowX points forwards.
_BRIDGE_REST = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])


def bridge_state(eef_pose: np.ndarray) -> np.ndarray:
    """SimplerEnv's ``agent/eef_pos`` [8] (position, quaternion wxyz, gripper opening) -> BridgeData's state [8]:
    position, roll, pitch, yaw from the pose pointing down, 0, gripper opening."""
    pose = np.asarray(eef_pose, np.float64)
    angles = roll_pitch_yaw(matrix(np.roll(pose[3:7], -1)) @ _BRIDGE_REST.T)
    return np.concatenate([pose[:3], angles, [0.0], pose[7:8]])


STATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "axis_angle": axis_angle,
    "bridge": bridge_state,
    "first_4": lambda values: values[:4],
}


def _opening_to_closing(action: np.ndarray) -> np.ndarray:
    """The last number: 0 (close) to 1 (open) -> +1 (close) or -1 (open), nothing between."""
    action = action.copy()
    action[-1] = -1.0 if action[-1] > 0.5 else 1.0
    return action


def _opening_to_sign(action: np.ndarray) -> np.ndarray:
    """The last number: 0 (close) to 1 (open) -> -1 (close) or +1 (open), nothing between."""
    action = action.copy()
    action[-1] = 1.0 if action[-1] > 0.5 else -1.0
    return action


def _euler_and_opening(action: np.ndarray) -> np.ndarray:
    """As :func:`_opening_to_sign`, and numbers 3 to 5 from roll, pitch, yaw to axis and angle."""
    action = _opening_to_sign(action)
    action[3:6] = axis_angle_of_rpy(action[3:6])
    return action


ACTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as_is": lambda action: action,
    "opening_to_closing": _opening_to_closing,
    "opening_to_sign": _opening_to_sign,
    "euler_and_opening": _euler_and_opening,
}


def turned(frame: np.ndarray) -> np.ndarray:
    """A frame [height, width, 3] turned by 180 degrees."""
    return np.ascontiguousarray(frame[::-1, ::-1])
