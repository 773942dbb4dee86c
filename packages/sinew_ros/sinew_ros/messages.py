"""Conversion of ROS 2 messages to numbers and back.

An input is any object with the fields of a message: of rclpy, of rosbags, or a DDS structure. An output is a
mapping of fields, from which each transport creates its own message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sinew_ros.contract import ARRAY, GOALS, GROUP, JOINT_STATE, SINGLE, TRAJECTORY, Output

MAX_COMPRESSED = 32 << 20  # largest compressed picture, bytes
# Encoding -> (bytes per pixel, positions of the red, green and blue bytes), from sensor_msgs/image_encodings.hpp.
ENCODINGS = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
    "mono8": (1, (0, 0, 0)),
}


class Refused(Exception):  # noqa: N818 - the name says what happened to the message
    """Error for a message that cannot be used. The text is a short reason. Messages are counted by this reason."""


def stamp(message: Any) -> float:
    """Return the stamp of a message in seconds; 0.0 if the driver did not set it."""
    time = message.header.stamp
    return int(time.sec) + 1e-9 * int(time.nanosec)


def check_picture(message: Any) -> None:
    """Raise :class:`Refused` for a sensor_msgs/Image that :func:`picture` cannot read. The pixels are not read."""
    form = ENCODINGS.get(message.encoding)
    if form is None:
        raise Refused(f"encoding {message.encoding[:40]!r}: expected {', '.join(ENCODINGS)}")
    if message.height <= 0 or message.width <= 0:
        raise Refused("the height or the width is 0")
    if message.step < message.width * form[0]:
        raise Refused("step is smaller than a row of pixels")
    if len(message.data) != message.step * message.height:
        raise Refused("the number of bytes differs from step x height")


def picture(message: Any) -> np.ndarray:
    """Return the frame of a sensor_msgs/Image, uint8 [height, width, 3] in RGB order.

    Raises:
        Refused: The encoding is not supported, or the number of bytes does not fit the size.
    """
    check_picture(message)
    size, order = ENCODINGS[message.encoding]
    height, width = int(message.height), int(message.width)
    data = np.frombuffer(bytes_of(message.data), np.uint8)
    rows = data.reshape(height, int(message.step))[:, : width * size]
    return np.ascontiguousarray(rows.reshape(height, width, size)[..., list(order)])


def compressed(message: Any) -> bytes:
    """Return the JPEG or PNG file in a sensor_msgs/CompressedImage. The server decodes the file.

    Raises:
        Refused: The message does not contain a JPEG or PNG file, or the file is too large.
    """
    data = bytes_of(message.data)
    if len(data) > MAX_COMPRESSED:
        raise Refused("the compressed picture is larger than 32 MiB")
    if not data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
        raise Refused("the data is neither JPEG nor PNG")
    return data


def joints(message: Any, names: Sequence[str], field: str) -> np.ndarray:
    """Return the values of named joints in a sensor_msgs/JointState, float64 [n].

    Args:
        message: The message.
        names: Names of the joints. The result has their order.
        field: Field of the message: position, velocity or effort.

    Raises:
        Refused: A joint is missing, or a value is not finite.
    """
    place = {name: index for index, name in enumerate(message.name)}
    values = np.asarray(getattr(message, field), np.float64)
    if len(values) != len(message.name):
        raise Refused(f"the number of values in {field} differs from the number of names")
    missing = [name for name in names if name not in place]
    if missing:
        raise Refused(f"the joint {missing[0]} is missing")
    result = values[[place[name] for name in names]]
    if not np.all(np.isfinite(result)):
        raise Refused("a value is not finite")
    return result


def bytes_of(data: Any) -> bytes:
    """Return the bytes of a uint8 sequence: an array, bytes, or a list of integers."""
    if isinstance(data, np.ndarray):
        return data.astype(np.uint8, copy=False).tobytes()
    return bytes(data)


def time_of(seconds: float) -> dict[str, int]:
    """Return seconds as the fields of a builtin_interfaces/Time or Duration."""
    nanoseconds = round(seconds * 1e9)
    return {"sec": nanoseconds // 10**9, "nanosec": nanoseconds % 10**9}


def header(seconds: float) -> dict[str, Any]:
    return {"stamp": time_of(seconds), "frame_id": ""}


def trajectory(output: Output, rows: np.ndarray, period: float) -> dict[str, Any]:
    """Convert actions to a trajectory_msgs/JointTrajectory.

    The stamp is 0, so a controller starts the trajectory at once, whatever the time of its clock is.

    Args:
        output: The output topic.
        rows: Actions of this output in the policy's units [n, D]. The first one is reached after one period.
        period: Seconds between two points.
    """
    return points(output.joints, _numbers(output, rows), period)


def points(joints: Sequence[str], rows: np.ndarray, period: float) -> dict[str, Any]:
    """Convert joint values to a trajectory_msgs/JointTrajectory.

    Args:
        joints: Names of the joints.
        rows: Values in the units of the message, float64 [n, D].
        period: Seconds between two points. The first point is reached after one period.
    """
    point_list = [
        {
            "positions": row.tolist(),
            "velocities": [],
            "accelerations": [],
            "effort": [],
            "time_from_start": time_of((index + 1) * period),
        }
        for index, row in enumerate(rows)
    ]
    return {"header": header(0.0), "joint_names": list(joints), "points": point_list}


def command(output: Output, row: np.ndarray, now: float) -> dict[str, Any]:
    """Convert one action to a message of the output's type. For an action server, the result is a goal.

    Args:
        output: The output topic.
        row: Action of this output in the policy's units [D].
        now: ROS time in seconds.
    """
    numbers = _numbers(output, row).tolist()
    if output.type == ARRAY:
        return {"layout": {"dim": [], "data_offset": 0}, "data": numbers}
    if output.type == GROUP:
        return {"name": output.group, "cmd": numbers}
    if output.type == SINGLE:
        return {"name": output.joints[0], "cmd": numbers[0]}
    if output.type in GOALS:
        if GOALS[output.type] == "speed":
            return {"width": numbers[0], "speed": output.constant}
        return {"command": {"position": numbers[0], "max_effort": output.constant}}
    assert output.type == JOINT_STATE, output.type
    values = {name: numbers if name == output.field else [] for name in ("position", "velocity", "effort")}
    return {"header": header(now), "name": list(output.joints), **values}


def differs(output: Output, row: np.ndarray, before: np.ndarray | None, sent: np.ndarray | None) -> bool:
    """Return True if an action needs a message of its own.

    Every action needs one on a topic. On an action server, a new goal is sent if the value differs from the last
    goal by ``output.change``. A tenth of this difference is enough once the values do not change any more.

    Args:
        output: The output topic.
        row: The present action.
        before: The previous action; None if there is none.
        sent: The last action that was sent as a goal; None if there is none.
    """
    if output.type not in GOALS or sent is None or before is None:
        return True
    moved, left = (abs(_numbers(output, row)[0] - _numbers(output, other)[0]) for other in (before, sent))
    return bool(left >= output.change or moved < output.change / 10 <= left)


def diagnostics(now: float, level: int, text: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a diagnostic_msgs/DiagnosticArray with one status.

    Args:
        now: ROS time in seconds.
        level: 0 for ok, 1 for a warning, 2 for an error.
        text: The message of the status.
        values: Further values by their names.
    """
    pairs = [{"key": key, "value": str(value)} for key, value in values.items()]
    status = {"level": level, "name": "sinew: policy", "message": text, "hardware_id": "", "values": pairs}
    return {"header": header(now), "status": [status]}


def _numbers(output: Output, rows: np.ndarray) -> np.ndarray:
    """Convert the values of actions from the policy's units to the units of the output's messages, float64."""
    return (np.asarray(rows, np.float64) - output.offset) / output.scale


def is_trajectory(output: Output) -> bool:
    return output.type == TRAJECTORY
