"""Read single parts of a record, for commands that show records or convert them. Each part is checked first, because
another program or person may have made the record.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sinew.core import SinewError
from sinew.records.recorder import Record

LATEST = 1e12  # a time must be smaller than this many seconds, whatever the clock


def seconds(record: Record, what: str, value: Any) -> float:
    """Return a time in a record, in seconds. ``what`` is its name for messages.

    Raises:
        SinewError: The value is not a number of seconds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LATEST:
        raise SinewError(f"{record.path}: {what}: expected seconds, got {str(value)[:80]}")
    return float(value)


def rows(record: Record) -> np.ndarray | None:
    """Return the actions, numbers [H, D]; None if the answer was an error.

    Raises:
        SinewError: The record contains no such numbers.
    """
    if record.actions is None:
        return None
    actions = np.asarray(record.actions)
    if actions.ndim != 2 or not actions.size or actions.dtype.kind not in "fiu":
        raise SinewError(
            f"{record.path}: actions: expected numbers [H, D], got {actions.dtype} {list(actions.shape)}"
        )
    return actions


def numbers(record: Record) -> np.ndarray:
    """Return the robot's state in a record, an array of numbers [D].

    Raises:
        SinewError: The record contains no such numbers.
    """
    state = np.asarray(record.observation.state)
    if state.ndim != 1 or state.dtype.kind not in "fiub":
        raise SinewError(f"{record.path}: state: expected numbers [D], got {state.dtype} {list(state.shape)}")
    return state


def pixels(record: Record, name: str) -> np.ndarray:
    """Return a camera frame of a record as uint8 [height, width, 3]. Floats in [0, 1] are converted.

    Raises:
        SinewError: The array is not a frame.
    """
    frame = np.asarray(record.observation.images[name])
    if frame.ndim != 3 or frame.shape[2] != 3 or not frame.size or frame.dtype.kind not in "uf":
        raise SinewError(
            f"{record.path}: images.{name}: expected uint8 [height, width, 3], or floats in [0, 1], got {frame.dtype}"
            f" {list(frame.shape)}"
        )
    if frame.dtype == np.uint8:
        return frame
    if frame.dtype.kind != "f" or not (frame.min() >= 0 and frame.max() <= 1):
        raise SinewError(
            f"{record.path}: images.{name}: expected uint8, or floats in [0, 1], got {frame.dtype} from {frame.min():g}"
            f" to {frame.max():g}"
        )
    return (frame * 255).round().astype(np.uint8)
