"""Conversions between the conventions of published policies and simulators: orientations, grippers, frames upside
down. Needs only numpy.

Quaternions are (x, y, z, w) unless a name states another order. Every function accepts and returns plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Convert a unit quaternion [4] to an axis times an angle [3], with the angle in [0, 2 pi].

    The formula is that of robosuite (``transform_utils.quat2axisangle``), and therefore that of LIBERO's
    demonstrations: w is clipped, and q and -q give *different* results. A negative w gives an angle above pi.
    """
    x, y, z, w = np.asarray(quaternion, np.float64)
    w = min(1.0, max(-1.0, w))
    length = np.sqrt(1.0 - w * w)
    if length < 1e-10:
        return np.zeros(3)
    return np.array([x, y, z]) * (2.0 * np.arccos(w) / length)


def matrix(quaternion: np.ndarray) -> np.ndarray:
    """Convert a unit quaternion [4] to a rotation matrix [3, 3]."""
    x, y, z, w = np.asarray(quaternion, np.float64)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def roll_pitch_yaw(rotation: np.ndarray) -> np.ndarray:
    """Convert a rotation matrix [3, 3] = Rz(yaw) Ry(pitch) Rx(roll) to [roll, pitch, yaw] in radians. Roll is 0 if
    pitch is a right angle.
    """
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
    """Convert [roll, pitch, yaw] to an axis times an angle [3], in radians. Policies that were trained on BridgeData
    return the angles, and SimplerEnv needs the axis times the angle.
    """
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
    """Convert SimplerEnv's ``agent/eef_pos`` to BridgeData's state.

    Args:
        eef_pose: [8]: position, quaternion (w, x, y, z), gripper opening.

    Returns:
        [8]: position, roll, pitch and yaw relative to a gripper that points down, 0, gripper opening.
    """
    pose = np.asarray(eef_pose, np.float64)
    angles = roll_pitch_yaw(matrix(np.roll(pose[3:7], -1)) @ _BRIDGE_REST.T)
    return np.concatenate([pose[:3], angles, [0.0], pose[7:8]])


STATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "axis_angle": axis_angle,
    "bridge": bridge_state,
    "first_4": lambda values: values[:4],
}


def _opening_to_closing(action: np.ndarray) -> np.ndarray:
    """Convert the last number of an action, a gripper from 0 (closed) to 1 (open), into +1 (close) or -1 (open)."""
    action = action.copy()
    action[-1] = -1.0 if action[-1] > 0.5 else 1.0
    return action


def _opening_to_sign(action: np.ndarray) -> np.ndarray:
    """Convert the last number of an action, a gripper from 0 (closed) to 1 (open), into -1 (close) or +1 (open)."""
    action = action.copy()
    action[-1] = 1.0 if action[-1] > 0.5 else -1.0
    return action


def _euler_and_opening(action: np.ndarray) -> np.ndarray:
    """Convert the gripper as :func:`_opening_to_sign`, and numbers 3 to 5 from roll, pitch, yaw to an axis times an
    angle.
    """
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
    """Turn a frame [height, width, 3] by 180 degrees."""
    return np.ascontiguousarray(frame[::-1, ::-1])
