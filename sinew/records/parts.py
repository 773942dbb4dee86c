"""Parts of a record that other programs take as they are: looked at first, as records come from elsewhere, too."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinew.core import SinewError
from sinew.records.recorder import Record

LATEST = 1e12  # largest time in seconds, for any clock


def seconds(record: Record, what: str, value: Any) -> float:
    """Return a time of a record. Raises :class:`SinewError` for an invalid value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LATEST:
        raise SinewError(f"{record.path}: {what}: expected seconds, got {str(value)[:80]}")
    return float(value)


def rows(record: Record) -> np.ndarray | None:
    """Return the actions, numbers [H, D], or None where the answer was an error. Raises :class:`SinewError`."""
    if record.actions is None:
        return None
    found = np.asarray(record.actions)
    if found.ndim != 2 or not found.size or found.dtype.kind not in "fiu":
        raise SinewError(
            f"{record.path}: actions: expected numbers [H, D], got {found.dtype} {list(found.shape)}"
        )
    return found


def numbers(record: Record) -> np.ndarray:
    """Return the state, numbers [D]. Raises :class:`SinewError`."""
    found = np.asarray(record.observation.state)
    if found.ndim != 1 or found.dtype.kind not in "fiub":
        raise SinewError(f"{record.path}: state: expected numbers [D], got {found.dtype} {list(found.shape)}")
    return found


def pixels(record: Record, name: str) -> np.ndarray:
    """Return a frame as uint8 [height, width, 3]; floats are in [0, 1]. Raises :class:`SinewError`."""
    found = np.asarray(record.observation.images[name])
    if found.ndim != 3 or found.shape[2] != 3 or not found.size or found.dtype.kind not in "uf":
        raise SinewError(
            f"{record.path}: images.{name}: expected uint8 [height, width, 3], or floats in [0, 1], got {found.dtype}"
            f" {list(found.shape)}"
        )
    if found.dtype == np.uint8:
        return found
    if found.dtype.kind != "f" or not (found.min() >= 0 and found.max() <= 1):
        raise SinewError(
            f"{record.path}: images.{name}: expected uint8, or floats in [0, 1], got {found.dtype} from {found.min():g}"
            f" to {found.max():g}"
        )
    return (found * 255).round().astype(np.uint8)
